"""Resources in Ray's words."""

from typing import Any

from cluster.config import Resources


def actor_options(resources: Resources) -> dict[str, Any]:
    """Resources in the words of Ray's actor options."""
    others = {name: amount for name, amount in resources.items() if name not in {"CPU", "GPU"}}
    return {
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
        "resources": others,
    }
