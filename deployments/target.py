"""The supervisor of one engine: starts it, makes it known, watches its progress, drains it."""

import asyncio
import logging
import uuid
from contextlib import suppress
from dataclasses import asdict, replace

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.handle import DeploymentHandle

from cluster.actors.engine import EngineActor
from cluster.actors.membership import REGISTER_SECONDS, Member, MemberKind, Snapshot
from cluster.config import DrafthouseConfig
from cluster.control.demand import TargetLoad
from cluster.logs import setup_logging
from cluster.messages import EngineLoad
from deployments.colocated import ColocatedDrafts
from deployments.supervision import START_SECONDS, follow, leave, start_child, yield_to_compute

logger = logging.getLogger(__name__)

PROBE_SECONDS = 10.0  # a target that makes no progress for so long is replaced
HEALTH_CHECK_SECONDS = PROBE_SECONDS + 5.0
DRAIN_POLL_SECONDS = 0.2
LOAD_SECONDS = 2.0
CLOSE_SECONDS = 2.0


class Target:
    """Complete once its engine has generated a token. Dies with its engine, and the other way.

    `callees` are deployments this one depends on: bound here, they are shut down after it.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits the constructor
        self, config: DrafthouseConfig, router: DeploymentHandle, *callees: DeploymentHandle
    ) -> None:
        del callees
        yield_to_compute()
        self._router = router
        self._drain_seconds = config.gateway.drain_seconds
        self._tasks: list[asyncio.Task[None]] = []
        engine_id = f"target-{uuid.uuid4().hex[:12]}"
        setup_logging(f"{engine_id}-supervisor", config.observability)
        self._engine = start_child(
            EngineActor, config.target.bundles[0], config, engine_id=engine_id
        )
        self._member = Member(kind=MemberKind.TARGET, member_id=engine_id, handle=self._engine)
        async with asyncio.timeout(START_SECONDS):
            await self._engine.probe.remote(timeout_seconds=START_SECONDS)
        self._tasks += [
            asyncio.create_task(self._end_with_engine()),
            asyncio.create_task(
                follow(router, member=lambda: self._member, on_snapshot=self._on_snapshot)
            ),
            asyncio.create_task(self._keep_load()),
        ]
        self._colocated = ColocatedDrafts(config, router)

    async def check_health(self) -> None:
        """Raises when the engine is gone, which Serve answers at once, or makes no progress."""
        try:
            async with asyncio.timeout(PROBE_SECONDS + 1.0):
                await self._engine.probe.remote(timeout_seconds=PROBE_SECONDS)
        except (TimeoutError, RayTaskError):
            logger.exception("engine %s makes no progress, and is ended", self._member.member_id)
            ray.kill(self._engine)
            raise

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of targets goes by; nothing until the engine has told its load."""
        load = self._member.load
        return asdict(TargetLoad.of(load)) if isinstance(load, EngineLoad) else {}

    async def __del__(self) -> None:
        """Take no new requests, let those under way end, then end the engine.

        What has not ended by then the engine gives up, and gateways take it elsewhere.
        """
        for task in self._tasks:
            task.cancel()
        await leave(self._router, self._member.member_id)
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(self._drain_seconds):
                # The engine is another process: there is no event of it to wait for here.
                while (load := await self._engine.load.remote()).running or load.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._engine.close.remote()
        await self._colocated.end()
        ray.kill(self._engine)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        engine_id = self._member.member_id
        self._engine.set_draft_workers.remote(snapshot.drafts_of(engine_id))
        self._engine.set_price_floor.remote(snapshot.floors.get(engine_id, 0.0))

    async def _keep_load(self) -> None:
        """Have the engine's load registered with it, a second old at most."""
        while True:
            with suppress(TimeoutError, RayError):  # its end is seen elsewhere
                async with asyncio.timeout(LOAD_SECONDS):
                    load = await self._engine.load.remote()
                    self._member = replace(self._member, load=load)
            await asyncio.sleep(REGISTER_SECONDS)

    async def _end_with_engine(self) -> None:
        """Await the engine's end, and make it final: it cannot serve any more."""
        try:
            await self._engine.run.remote()
        except RayActorError:
            logger.error("engine %s died", self._member.member_id)  # noqa: TRY400 - no trace of ours
        except RayTaskError:
            logger.exception("engine %s failed", self._member.member_id)
        ray.kill(self._engine)
