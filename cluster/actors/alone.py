"""One draft worker by itself, on a Ray of this process's own: for measuring the way to it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median

import ray
from ray.actor import ActorHandle

from cluster.actors.draft import DraftWorker
from cluster.actors.remote_drafter import RemoteDrafter
from cluster.config import DrafthouseConfig, ModelDrafterConfig
from cluster.drafters.model import DraftModel

START_SECONDS = 60.0
NUM_CALLS = 50
PAUSE_SECONDS = 0.02
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


@dataclass(frozen=True, slots=True)
class Lone:
    """A drafter whose model is in another process, and what a call takes that does nothing there.

    `call_seconds` are from here and back, at the median of calls as far apart as steps are.
    """

    drafter: RemoteDrafter
    call_seconds: float


@asynccontextmanager
async def lone_draft_worker(
    make_model: Callable[[], DraftModel], *, context_limit: int
) -> AsyncIterator[Lone]:
    """Make a model in a process of its own, which ends on the way out."""
    worker = ray.remote(num_cpus=0, max_restarts=0)(LoneDraftWorker).remote(make_model)
    try:
        async with asyncio.timeout(START_SECONDS):
            await worker.ping.remote()
        call_seconds = await _call_seconds(worker)
        drafter = RemoteDrafter("alone", engine_id="alone", context_limit=context_limit)
        drafter.set_workers({"alone": worker})
        try:
            yield Lone(drafter, call_seconds)
        finally:
            await drafter.close()
    finally:
        ray.kill(worker)


async def _call_seconds(worker: ActorHandle) -> float:
    found = []
    for _ in range(NUM_CALLS):
        await asyncio.sleep(PAUSE_SECONDS)
        begin = time.perf_counter()
        await worker.reference.remote()
        found.append(time.perf_counter() - begin)
    return median(found)


class LoneDraftWorker(DraftWorker):
    """A draft worker of any model that can be made from nothing."""

    def __init__(self, make_model: Callable[[], DraftModel]) -> None:
        self._make_model = make_model
        super().__init__(DrafthouseConfig(), ModelDrafterConfig(model="alone"))

    def make_model(self, config: DrafthouseConfig, drafter: ModelDrafterConfig) -> DraftModel:
        """What was given, instead of what the configuration names."""
        del config, drafter
        return self._make_model()
