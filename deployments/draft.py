"""The supervisor of one draft worker, and the deployments that pools of them have."""

import os
import re
from dataclasses import asdict

from ray.serve.handle import DeploymentHandle

from cluster.config import AnyDrafterConfig, DrafthouseConfig, ModelDrafterConfig, draft_models
from cluster.logs import setup_logging
from deployments.draft_keeper import DraftKeeper
from deployments.supervision import yield_to_compute

LONGEST_NAME = 48  # of a pool in a deployment's name


def draft_deployments(drafter: AnyDrafterConfig) -> dict[str, ModelDrafterConfig]:
    """The pools that have a deployment, by its name: Draft, or Draft- and the pool's where several.

    What cannot be in a deployment's name is a dash; names that are then the same are numbered.
    """
    pools = [model for model in draft_models(drafter) if model.placement == "worker"]
    if len(pools) == 1:
        return {"Draft": pools[0]}
    named: dict[str, ModelDrafterConfig] = {}
    for pool in pools:
        wanted = name = "Draft-" + re.sub(r"[^\w.]+", "-", pool.pool)[-LONGEST_NAME:].strip("-")
        while name in named:
            name = f"{wanted}-{len(named)}"
        named[name] = pool
    return named


class Draft:
    """Complete once its worker has loaded. A worker that dies is replaced in this process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits the constructor
        self, config: DrafthouseConfig, drafter: ModelDrafterConfig, router: DeploymentHandle
    ) -> None:
        yield_to_compute()
        setup_logging(f"draft-supervisor-{os.getpid()}", config.observability)
        self._keeper: DraftKeeper | None = None
        self._keeper = await DraftKeeper.begin(config, drafter, router)

    async def check_health(self) -> None:
        """Raises when there is no worker and none can be started."""
        if self._keeper is not None:
            self._keeper.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of workers goes by."""
        return asdict(self._keeper.drafting) if self._keeper is not None else {}

    async def __del__(self) -> None:
        """End the worker."""
        if self._keeper is not None:
            await self._keeper.end()
