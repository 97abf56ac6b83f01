"""The whole configuration: nested, frozen, closed. A typo is an error that names the key.

Nothing here downloads, connects or logs. A file for each section.
"""

from cluster.config.autoscaling import (
    AutoscalingConfig,
    ReplicaLimits,
)
from cluster.config.base import (
    BUILTIN_MODEL,
    Config,
    DType,
    Resources,
)
from cluster.config.drafter import (
    AnyDrafterConfig,
    BesideConfig,
    ChoiceDrafterConfig,
    DrafterConfig,
    EagleDrafterConfig,
    HeadDrafterConfig,
    MedusaDrafterConfig,
    ModelDrafterConfig,
    NgramDrafterConfig,
    NoDrafterConfig,
    SkipDrafterConfig,
    draft_heads,
    draft_models,
    draft_tables,
    drafter_from_flag,
    drafters_beside,
)
from cluster.config.environment import (
    prepare_ray_environment,
    prepare_torch_environment,
)
from cluster.config.gateway import (
    GatewayConfig,
)
from cluster.config.observability import (
    ObservabilityConfig,
)
from cluster.config.root import (
    DrafthouseConfig,
    load_config,
    parse_config,
)
from cluster.config.router import (
    RouterConfig,
)
from cluster.config.speculation import (
    SpeculationConfig,
    speculation_from_flag,
)
from cluster.config.target import (
    TargetConfig,
)

__all__ = [
    "BUILTIN_MODEL",
    "AnyDrafterConfig",
    "AutoscalingConfig",
    "BesideConfig",
    "ChoiceDrafterConfig",
    "Config",
    "DType",
    "DrafterConfig",
    "DrafthouseConfig",
    "EagleDrafterConfig",
    "GatewayConfig",
    "HeadDrafterConfig",
    "MedusaDrafterConfig",
    "ModelDrafterConfig",
    "NgramDrafterConfig",
    "NoDrafterConfig",
    "ObservabilityConfig",
    "ReplicaLimits",
    "Resources",
    "RouterConfig",
    "SkipDrafterConfig",
    "SpeculationConfig",
    "TargetConfig",
    "draft_heads",
    "draft_models",
    "draft_tables",
    "drafter_from_flag",
    "drafters_beside",
    "load_config",
    "parse_config",
    "prepare_ray_environment",
    "prepare_torch_environment",
    "speculation_from_flag",
]
