"""What both supervisors do: start a child in their own placement group, and keep it known."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors.membership import REGISTER_SECONDS, Member, Snapshot
from cluster.config import Resources

logger = logging.getLogger(__name__)

SUPERVISOR_CPUS = 0.05
YIELDING = 5  # added to the nice value of processes that do not compute
START_SECONDS = 900.0  # a model may have to be fetched and converted
ROUTER_SECONDS = 2.0


def yield_to_compute() -> None:
    """Let targets and drafts on the same cores go first: half a step waits for its other half."""
    os.nice(YIELDING)


def actor_options(resources: Resources) -> dict[str, Any]:
    """Resources in the words of Ray's actor options."""
    others = {name: amount for name, amount in resources.items() if name not in {"CPU", "GPU"}}
    return {
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
        "resources": others,
    }


def bundles(resources: Resources) -> list[dict[str, float]]:
    """The placement group of a replica: the supervisor's bundle, then its child's."""
    return [{"CPU": SUPERVISOR_CPUS}, dict(resources)]


def start_child(actor: type, resources: Resources, *args: object, **kwargs: object) -> ActorHandle:
    """Start an actor in the second bundle of this replica; it dies with the replica."""
    options = ray.remote(
        **actor_options(resources),
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            ray.util.get_current_placement_group(), placement_group_bundle_index=1
        ),
    )
    return options(actor).remote(*args, **kwargs)


async def follow(
    router: DeploymentHandle,
    *,
    member: Callable[[], Member | None],
    on_snapshot: Callable[[Snapshot], None],
) -> None:
    """Say every second who is here, if anyone, and hear who else is. Never ends by itself.

    While the router is gone the last snapshot stands.
    """
    snapshot = Snapshot()
    heard = True
    while True:
        try:
            async with asyncio.timeout(ROUTER_SECONDS):
                snapshot = (await router.register.remote(member())).after(snapshot)
        except (TimeoutError, RayError, RayServeException) as error:
            if heard:
                logger.warning("the router does not answer: %s", type(error).__name__)
            heard = False
        else:
            heard = True
            on_snapshot(snapshot)
        await asyncio.sleep(REGISTER_SECONDS)


async def leave(router: DeploymentHandle, member_id: str) -> None:
    """Tell the router that a member takes no new work; a router that is gone knows nobody."""
    with suppress(TimeoutError, RayError, RayServeException):
        async with asyncio.timeout(ROUTER_SECONDS):
            await router.remove.remote(member_id)
