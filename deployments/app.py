"""The application: which deployments there are, and who is bound to whom.

Serve shuts callers down before what they call: gateway, target, draft, router.
"""

from pathlib import Path
from typing import Any

from ray import serve

from cluster.config import (
    DrafthouseConfig,
    ModelDrafterConfig,
    Resources,
    load_config,
    parse_config,
)
from deployments.draft import Draft
from deployments.gateway import Gateway
from deployments.router import Router
from deployments.supervision import SUPERVISOR_CPUS, actor_options, bundles
from deployments.target import HEALTH_CHECK_SECONDS, Target

ROUTER_RESOURCES: Resources = {"CPU": 0.1}
MANY = 10_000  # calls under way at once, far more than there ever are
DRAIN_MARGIN_SECONDS = 10.0

COMMON: dict[str, Any] = {
    "health_check_period_s": 1.0,
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
        **COMMON, name="Router", ray_actor_options=actor_options(ROUTER_RESOURCES)
    )
    supervised = COMMON | {
        "ray_actor_options": {"num_cpus": SUPERVISOR_CPUS},
        "max_surge_percent": 100,
        "graceful_shutdown_timeout_s": config.gateway.drain_seconds + DRAIN_MARGIN_SECONDS,
    }
    target = serve.deployment(Target).options(
        **supervised,
        name="Target",
        num_replicas=config.target.num_replicas,
        placement_group_bundles=bundles(config.target.resources),
        health_check_timeout_s=HEALTH_CHECK_SECONDS,
    )
    bound_router = router.bind()
    drafts = []
    match config.drafter:
        case ModelDrafterConfig(placement="worker") as drafter:
            draft = serve.deployment(Draft).options(
                **supervised,
                name="Draft",
                num_replicas=drafter.num_replicas,
                placement_group_bundles=bundles(drafter.resources),
            )
            drafts.append(draft.bind(config, drafter, bound_router))
    # No surge: a port is listened on by one gateway at a time.
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        **COMMON,
        name="Gateway",
        num_replicas=config.gateway.num_replicas,
        ray_actor_options=actor_options(config.gateway.resources),
        graceful_shutdown_timeout_s=config.gateway.drain_seconds + DRAIN_MARGIN_SECONDS,
    )
    return gateway.bind(config, target.bind(config, bound_router, *drafts), bound_router)
