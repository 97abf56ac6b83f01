"""Keeps one draft worker alive, known, and drafting with what its pool is to draft with.

start ──loaded, and the pool's weights in use──> member ──dies or stalls──> start another
                                                   │
                         the pool has other weights └──> told, and in use when it says so
"""

import asyncio
import logging
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.actors.draft import DraftWorker
from cluster.actors.membership import Member, MemberKind, Snapshot
from cluster.config import DrafthouseConfig, ModelDrafterConfig
from cluster.control.assignment import PoolHint
from cluster.control.scaling import DraftingLoad
from cluster.errors import DrafterUnavailable
from cluster.messages import DraftLoad, DraftWeights
from deployments.supervision import ROUTER_SECONDS, START_SECONDS, follow, leave, start_child

logger = logging.getLogger(__name__)

PING_SECONDS = 0.25
STALL_SECONDS = 30.0  # a worker that answers no exchange for so long is replaced
ADOPT_SECONDS = 120.0  # that a new worker is given to load the pool's weights
RETRY_SECONDS = 5.0


class DraftKeeper:
    """The worker's process is a child of this one, in a bundle of this replica."""

    def __init__(
        self,
        config: DrafthouseConfig,
        drafter: ModelDrafterConfig,
        router: DeploymentHandle,
        *,
        bundle: int,
    ) -> None:
        self._config = config
        self._drafter = drafter
        self._router = router
        self._bundle = bundle
        self._weights = DraftWeights()  # of the pool, as far as heard
        self._hint = PoolHint()
        self._told = 0  # the version that the worker was last told to use
        self._telling: asyncio.Task[None] | None = None
        self._member: Member | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    @classmethod
    async def begin(
        cls,
        config: DrafthouseConfig,
        drafter: ModelDrafterConfig,
        router: DeploymentHandle,
        *,
        bundle: int = 1,
    ) -> Self:
        """With a worker that has loaded. Raises when none can start."""
        keeper = cls(config, drafter, router, bundle=bundle)
        with suppress(TimeoutError, RayError, RayServeException):  # then it is heard of later
            async with asyncio.timeout(ROUTER_SECONDS):
                keeper._hear(await router.register.remote(None))
        worker = await keeper._start_worker()
        keeper._keeping = asyncio.create_task(keeper._keep(worker))
        keeper._following = asyncio.create_task(
            follow(router, member=lambda: keeper._member, on_snapshot=keeper._hear)
        )
        return keeper

    @property
    def load(self) -> DraftLoad:
        """What the worker last said of itself; nothing while there is none."""
        member = self._member
        return member.load if member and isinstance(member.load, DraftLoad) else DraftLoad()

    @property
    def drafting(self) -> DraftingLoad:
        """What the number of workers goes by, in the router's words."""
        return DraftingLoad.of(self._hint)

    def check(self) -> None:
        """Raises DrafterUnavailable when there is no worker and none can be started."""
        if self._keeping is not None and self._keeping.done():
            raise DrafterUnavailable("died") from self._keeping.exception()

    async def ended(self) -> None:
        """Pend until no worker can be started any more."""
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    async def end(self) -> None:
        """Drafts are not waited for: whoever asks goes on without."""
        for task in (self._keeping, self._following, self._telling):
            if task is not None:
                task.cancel()
        if self._member is not None:
            await leave(self._router, self._member.member_id)
            ray.kill(self._member.handle)

    def _hear(self, snapshot: Snapshot) -> None:
        self._hint = snapshot.hints.pools.get(self._drafter.pool, PoolHint())
        weights = snapshot.weights.get(self._drafter.pool)
        if weights is not None and weights.turn > self._weights.turn:
            self._weights = weights

    async def _keep(self, worker: Member) -> None:
        """Replace the worker whenever it dies or stalls; ends by raising when none can start."""
        while True:
            self._member = worker
            await self._until_gone(worker)
            self._member = None
            ray.kill(worker.handle)
            worker = await self._start_worker()
            logger.warning("draft worker %s takes its place", worker.member_id)

    async def _start_worker(self) -> Member:
        worker = start_child(
            DraftWorker,
            self._drafter.resources,
            self._config,
            self._drafter,
            bundle=self._bundle,
        )
        self._told = 0
        try:
            load = await self._loaded(worker)
        except BaseException:
            ray.kill(worker)  # or nothing else fits in the bundle
            raise
        return Member(
            kind=MemberKind.DRAFT,
            member_id=f"draft-{uuid.uuid4().hex[:12]}",
            handle=worker,
            pool=self._drafter.pool,
            load=replace(load, weights=self._weights),
        )

    async def _loaded(self, worker: ActorHandle) -> DraftLoad:
        """What it says once it drafts, if that is to be had with the pool's weights."""
        async with asyncio.timeout(START_SECONDS):
            load: DraftLoad = await worker.load.remote()
        with suppress(TimeoutError):
            async with asyncio.timeout(ADOPT_SECONDS):
                while load.version != self._weights.version:
                    self._keep_told(worker)
                    await asyncio.sleep(PING_SECONDS)
                    load = await worker.load.remote()
        return load

    async def _until_gone(self, worker: Member) -> None:
        """Return when the worker has died, or answers nothing for STALL_SECONDS."""
        try:
            while True:
                async with asyncio.timeout(STALL_SECONDS):
                    load = await worker.handle.load.remote()
                self._member = replace(worker, load=replace(load, weights=self._weights))
                self._keep_told(worker.handle)
                await asyncio.sleep(PING_SECONDS)
        except (TimeoutError, RayError) as error:
            logger.warning("draft worker %s is gone: %s", worker.member_id, type(error).__name__)

    def _keep_told(self, worker: ActorHandle) -> None:
        """Tell the worker when its pool has other weights."""
        if self._telling is not None and not self._telling.done():
            return
        if self._told != self._weights.version:
            self._telling = asyncio.create_task(self._tell(worker, self._weights.version))

    async def _tell(self, worker: ActorHandle, version: int) -> None:
        """Have it load a version; where that is not to be had now it is tried again."""
        try:
            async with asyncio.timeout(ROUTER_SECONDS):
                refs = await self._router.draft_weights.remote(self._drafter.pool, version)
            if version == 0 or refs:
                await worker.adopt.remote(version, *refs)
                self._told = version
                return
            problem = "the router has another"
        except (TimeoutError, RayError, RayServeException) as error:
            problem = type(error).__name__
        logger.warning("version %d of %s: %s", version, self._drafter.pool, problem)
        await asyncio.sleep(RETRY_SECONDS)
