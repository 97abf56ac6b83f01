"""What both supervisors do: start a child in their own placement group, and keep it known."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors.membership import REGISTER_SECONDS, Member, Snapshot
from cluster.actors.placement import actor_options
from cluster.config import Resources

logger = logging.getLogger(__name__)

SUPERVISOR_CPUS = 0.05
YIELDING = 5  # added to the nice value of processes that do not compute
START_SECONDS = 900.0  # a model may have to be fetched and converted
ROUTER_SECONDS = 2.0


def yield_to_compute() -> None:
    """Let targets and drafts on the same cores go first: half a step waits for its other half."""
    os.nice(YIELDING)


def bundles(*children: Resources) -> list[dict[str, float]]:
    """The placement group of a replica: the supervisor's bundle, then its children's."""
    return [{"CPU": SUPERVISOR_CPUS}, *map(dict, children)]


def start_child(
    actor: type, resources: Resources, *args: object, bundle: int = 1, **kwargs: object
) -> ActorHandle:
    """Start an actor in a bundle of this replica; it dies with the replica."""
    options = ray.remote(
        **actor_options(resources),
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            ray.util.get_current_placement_group(), placement_group_bundle_index=bundle
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

    While the router is gone the last snapshot stands. `on_snapshot` is called at every answer.
    """
    snapshot = Snapshot()
    heard = True
    while True:
        try:
            async with asyncio.timeout(ROUTER_SECONDS):
                news = await router.register.remote(member(), snapshot.version)
        except (TimeoutError, RayError, RayServeException) as error:
            if heard:
                logger.warning("the router does not answer: %s", type(error).__name__)
            heard = False
        else:
            heard = True
            if news is not None:
                snapshot = news.after(snapshot)
            on_snapshot(snapshot)
        await asyncio.sleep(REGISTER_SECONDS)


async def leave(router: DeploymentHandle, member_id: str) -> None:
    """Tell the router that a member takes no new work; a router that is gone knows nobody."""
    with suppress(TimeoutError, RayError, RayServeException):
        async with asyncio.timeout(ROUTER_SECONDS):
            await router.remove.remote(member_id)
