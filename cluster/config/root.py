"""The whole, and reading it."""

from pathlib import Path
from typing import Self

import yaml
from pydantic import ValidationError, model_validator

from cluster.config.autoscaling import AutoscalingConfig
from cluster.config.base import BUILTIN_MODEL, Config
from cluster.config.drafter import DrafterConfig, NgramDrafterConfig, drafters_beside
from cluster.config.gateway import GatewayConfig
from cluster.config.observability import ObservabilityConfig
from cluster.config.router import RouterConfig
from cluster.config.speculation import SpeculationConfig
from cluster.config.target import TargetConfig
from cluster.errors import ConfigurationError, NotBesideTarget


class DrafthouseConfig(Config):
    """One served model and everything around it. `name` is what requests call it."""

    name: str = BUILTIN_MODEL
    target: TargetConfig = TargetConfig()
    drafter: DrafterConfig = NgramDrafterConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    gateway: GatewayConfig = GatewayConfig()
    router: RouterConfig = RouterConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _target_is_at_hand(self) -> Self:
        """Raises NotBesideTarget where the target is not in the engine's process."""
        ranks = self.target.tensor_parallel_size
        for drafter in drafters_beside(self.drafter):
            if ranks > 1:
                problem = f"target.tensor_parallel_size is {ranks}, which makes it several"
                raise NotBesideTarget(drafter=drafter.pool, problem=problem)
        return self


def load_config(path: Path) -> DrafthouseConfig:
    """Read a YAML file. Raises ConfigurationError naming every key that is wrong."""
    try:
        return parse_config(yaml.safe_load(path.read_text()) or {})
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: is no YAML: {error}") from error


def parse_config(data: object) -> DrafthouseConfig:
    """Check plain data against the model. Raises ConfigurationError naming every wrong key."""
    try:
        return DrafthouseConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'the whole'}: {item['msg']}"
            for item in error.errors(include_url=False)
        )
        raise ConfigurationError(problems) from error
