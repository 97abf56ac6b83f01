"""The supervisor of one draft worker: starts it, makes it known, and replaces it when gone."""

import asyncio
import logging
import uuid

import ray
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from cluster.actors.draft import DraftWorker
from cluster.actors.membership import Member, MemberKind, Snapshot
from cluster.config import DrafthouseConfig, ModelDrafterConfig
from cluster.errors import DrafterUnavailable
from deployments.supervision import START_SECONDS, follow, leave, start_child, yield_to_compute

logger = logging.getLogger(__name__)

PING_SECONDS = 0.25
STALL_SECONDS = 30.0  # a worker that answers no exchange for so long is replaced


class Draft:
    """Complete once its worker has loaded. A worker that dies is replaced in this process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits the constructor
        self, config: DrafthouseConfig, drafter: ModelDrafterConfig, router: DeploymentHandle
    ) -> None:
        yield_to_compute()
        self._config = config
        self._drafter = drafter
        self._router = router
        self._tasks: list[asyncio.Task[None]] = []
        self._member: Member | None = None
        worker = await self._start_worker()
        self._keeping = asyncio.create_task(self._keep_worker(worker))
        self._tasks += [
            self._keeping,
            asyncio.create_task(follow(router, member=lambda: self._member, on_snapshot=_ignore)),
        ]

    async def check_health(self) -> None:
        """Raises when there is no worker and none can be started."""
        if self._keeping.done():
            raise DrafterUnavailable("died") from self._keeping.exception()

    async def __del__(self) -> None:
        """Drafts are not waited for: whoever asks goes on without."""
        for task in self._tasks:
            task.cancel()
        if self._member is not None:
            await leave(self._router, self._member.member_id)
            ray.kill(self._member.handle)

    async def _start_worker(self) -> Member:
        worker = start_child(DraftWorker, self._drafter.resources, self._config, self._drafter)
        async with asyncio.timeout(START_SECONDS):
            await worker.ping.remote()
        return Member(
            kind=MemberKind.DRAFT, member_id=f"draft-{uuid.uuid4().hex[:12]}", handle=worker
        )

    async def _keep_worker(self, worker: Member) -> None:
        """Replace the worker whenever it dies or stalls; ends by raising when none can start."""
        while True:
            self._member = worker
            await _until_gone(worker)
            self._member = None
            ray.kill(worker.handle)
            worker = await self._start_worker()
            logger.warning("draft worker %s takes its place", worker.member_id)


async def _until_gone(worker: Member) -> None:
    """Return when the worker has died, or answers nothing for STALL_SECONDS."""
    try:
        while True:
            async with asyncio.timeout(STALL_SECONDS):
                await worker.handle.ping.remote()
            await asyncio.sleep(PING_SECONDS)
    except (TimeoutError, RayError) as error:
        logger.warning("draft worker %s is gone: %s", worker.member_id, type(error).__name__)


def _ignore(snapshot: Snapshot) -> None:
    """A draft worker needs to know nobody: engines come to it."""
    del snapshot
