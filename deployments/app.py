"""The application: which deployments there are, and who is bound to whom.

Serve shuts callers down before what they call: gateway, target, draft, router.
"""

from pathlib import Path
from typing import Any

from ray import serve

from cluster.actors.placement import actor_options
from cluster.config import (
    DrafthouseConfig,
    ReplicaLimits,
    load_config,
    parse_config,
)
from deployments.autoscaling import DraftPolicy, GatewayPolicy, TargetPolicy, autoscaling
from deployments.colocated import beside
from deployments.draft import Draft, draft_deployments
from deployments.gateway import Gateway
from deployments.router import Router
from deployments.supervision import SUPERVISOR_CPUS, bundles
from deployments.target import HEALTH_CHECK_SECONDS, Target

MANY = 10_000  # calls under way at once, far more than there ever are
DRAIN_MARGIN_SECONDS = 10.0

COMMON: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 5.0,  # three in a row: who is stopped is replaced in 15 seconds
    "graceful_shutdown_wait_loop_s": 0.1,
    "max_ongoing_requests": MANY,
    "logging_config": {"log_level": "WARNING", "enable_access_log": False},
}


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application for `{"config": path}`, or for a configuration as plain data.

    Raises ConfigurationError.
    """
    path = args.get("config")
    return build(load_config(Path(path)) if path is not None else parse_config(args))


def build(config: DrafthouseConfig) -> serve.Application:
    """The application for a configuration."""
    router = serve.deployment(Router).options(
        **COMMON, name="Router", ray_actor_options=actor_options(config.router.resources)
    )
    supervised = COMMON | {
        "ray_actor_options": {"num_cpus": SUPERVISOR_CPUS},
        "max_surge_percent": 100,
        "graceful_shutdown_timeout_s": config.gateway.drain_seconds + DRAIN_MARGIN_SECONDS,
    }
    target = serve.deployment(Target).options(
        **supervised | {"health_check_timeout_s": HEALTH_CHECK_SECONDS},
        name="Target",
        **replicas(config.target.num_replicas, config.autoscaling.target, TargetPolicy),
        placement_group_bundles=[
            *bundles(*config.target.bundles),
            *(dict(drafter.resources) for drafter in beside(config.drafter)),
        ],
        placement_group_strategy=config.target.placement_strategy,
    )
    bound_router = router.bind(config)
    drafts = []
    for name, drafter in draft_deployments(config.drafter).items():
        draft = serve.deployment(Draft).options(
            **supervised,
            name=name,
            **replicas(drafter.num_replicas, config.autoscaling.drafts, DraftPolicy),
            placement_group_bundles=bundles(drafter.resources),
            placement_group_strategy="STRICT_PACK",  # a worker dies with its supervisor's node
        )
        drafts.append(draft.bind(config, drafter, bound_router))
    # No surge: a port is listened on by one gateway at a time.
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        **COMMON,
        name="Gateway",
        **replicas(config.gateway.num_replicas, config.autoscaling.gateway, GatewayPolicy),
        ray_actor_options=actor_options(config.gateway.resources),
        graceful_shutdown_timeout_s=config.gateway.drain_seconds + DRAIN_MARGIN_SECONDS,
    )
    return gateway.bind(config, target.bind(config, bound_router, *drafts), bound_router)


def replicas(number: int, limits: ReplicaLimits | None, policy: type) -> dict[str, Any]:
    """So many for good; or where there are limits between which they may change, at first."""
    if limits is None:
        return {"num_replicas": number}
    section = limits.model_dump(mode="json")
    return {"autoscaling_config": autoscaling(policy, section, initial=limits.initial(number))}
