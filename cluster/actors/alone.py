"""One draft worker by itself, on a Ray of this process's own: for measuring the way to it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import ray

from cluster.actors.draft import DraftWorker
from cluster.actors.remote_drafter import RemoteDrafter
from cluster.config import DrafthouseConfig, ModelDrafterConfig
from cluster.drafters.model import DraftModel

START_SECONDS = 60.0
OBJECT_STORE_BYTES = 128 * 2**20  # next to nothing is put there


@contextmanager
def lone_ray() -> Iterator[None]:
    """A Ray cluster without Serve, ended on the way out."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def lone_draft_worker(
    make_model: Callable[[], DraftModel], *, context_limit: int
) -> AsyncIterator[RemoteDrafter]:
    """A drafter whose model is made in a process of its own, which ends on the way out."""
    worker = ray.remote(num_cpus=0, max_restarts=0)(LoneDraftWorker).remote(make_model)
    try:
        async with asyncio.timeout(START_SECONDS):
            await worker.ping.remote()
        drafter = RemoteDrafter("alone", engine_id="alone", context_limit=context_limit)
        drafter.set_workers({"alone": worker})
        try:
            yield drafter
        finally:
            await drafter.close()
    finally:
        ray.kill(worker)


class LoneDraftWorker(DraftWorker):
    """A draft worker of any model that can be made from nothing."""

    def __init__(self, make_model: Callable[[], DraftModel]) -> None:
        self._make_model = make_model
        super().__init__(DrafthouseConfig(), ModelDrafterConfig(model="alone"))

    def make_model(self, config: DrafthouseConfig, drafter: ModelDrafterConfig) -> DraftModel:
        """What was given, instead of what the configuration names."""
        del config, drafter
        return self._make_model()
