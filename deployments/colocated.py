"""Draft workers that run beside a target replica, in the last bundles of its placement group."""

import asyncio
import logging

import ray
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from cluster.config import AnyDrafterConfig, DrafthouseConfig, ModelDrafterConfig, draft_models
from cluster.errors import DrafthouseError
from deployments.draft_keeper import DraftKeeper

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0


def beside(drafter: AnyDrafterConfig) -> list[ModelDrafterConfig]:
    """One entry for each worker beside a target replica."""
    return [
        model
        for model in draft_models(drafter)
        if model.placement == "colocated"
        for _ in range(model.num_replicas)
    ]


class ColocatedDrafts:
    """Keeps those workers. What becomes of them concerns no target: it goes on without."""

    def __init__(self, config: DrafthouseConfig, router: DeploymentHandle) -> None:
        workers = beside(config.drafter)
        group = ray.util.get_current_placement_group()
        first = group.bundle_count - len(workers) if workers else 0
        self._keepers: dict[int, DraftKeeper] = {}
        self._tasks = [
            asyncio.create_task(self._keep(config, drafter, router, bundle=bundle))
            for bundle, drafter in enumerate(workers, start=first)
        ]

    async def end(self) -> None:
        """End all."""
        for task in self._tasks:
            task.cancel()
        for keeper in self._keepers.values():
            await keeper.end()

    async def _keep(
        self,
        config: DrafthouseConfig,
        drafter: ModelDrafterConfig,
        router: DeploymentHandle,
        *,
        bundle: int,
    ) -> None:
        """Have a worker there, and try again later when none can start."""
        while True:
            try:
                keeper = await DraftKeeper.begin(config, drafter, router, bundle=bundle)
                self._keepers[bundle] = keeper
                await keeper.ended()
                await keeper.end()
            except (TimeoutError, RayError, DrafthouseError):
                logger.exception("no draft worker of %s beside the target", drafter.pool)
            await asyncio.sleep(RETRY_SECONDS)
