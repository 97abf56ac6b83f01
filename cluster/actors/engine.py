"""An engine as an actor: requests come in by small calls, tokens go out by one stream a gateway.

The actor's event loop runs the control side; the target computes in a thread of its own.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace

from prometheus_client import CollectorRegistry

from cluster.actors.membership import Member
from cluster.actors.outbox import HEARTBEAT_SECONDS, Outbox
from cluster.actors.packing import pack_outputs
from cluster.actors.remote_drafter import RemoteDrafter
from cluster.config import DrafthouseConfig, draft_models
from cluster.engine.engine import Engine
from cluster.errors import TargetUnavailable
from cluster.garbage import freeze_loaded
from cluster.logs import setup_logging
from cluster.messages import DraftLoad, EngineLoad, ModelInfo, OutputBatch, Rule
from cluster.metrics import Family, collect
from cluster.request import Request, SamplingParams, SpeculationParams, StoppingParams

logger = logging.getLogger(__name__)

STREAM_SECONDS = 3600.0  # after which a stream ends, to be opened again under the same name
GONE_SECONDS = 15.0  # after which a gateway that takes nothing is given up
FRESH_SECONDS = 5.0  # a token younger than this needs no probe
POLL_SECONDS = 0.05

PROBE = Request(
    request_id="probe",
    prompt_token_ids=(0,),
    sampling=SamplingParams(seed=0, temperature=0.0),
    stopping=StoppingParams(max_tokens=1, ignore_eos=True),
    speculation=SpeculationParams(enabled=False),
)


class EngineHost:
    """Runs one engine for any number of gateways, from inside an event loop.

    A stream is named by the gateway that reads it. Requests are given with the name of the stream
    that is to carry their tokens, and end with it: a gateway whose stream broke opens another
    under a new name, and submits again what had not finished.
    """

    def __init__(self, engine: Engine, *, engine_id: str) -> None:
        self._engine = engine
        self._engine_id = engine_id
        self._outboxes: dict[str, Outbox] = {}
        self._num_probed_steps = 0
        self._last_progress = float("-inf")
        self._running = asyncio.create_task(engine.run())
        self._collecting = asyncio.create_task(self._give_up_gone_gateways())

    async def run(self) -> None:
        """Pend for as long as the engine runs. Raises TargetUnavailable when it failed."""
        await asyncio.shield(self._running)

    async def load(self) -> EngineLoad:
        """How busy the engine is."""
        return self._engine.load()

    async def set_price_floor(self, floor: float) -> None:
        """Have no draft position verified whose survival is below the floor."""
        self._engine.set_price_floor(floor)

    async def submit(self, stream: str, request: Request) -> None:
        """Take a request in, its tokens to go to `stream`. Raises what Engine.submit raises."""
        outbox = self._outbox(stream)
        outbox.request_ids.add(request.request_id)
        try:
            self._engine.submit(request, outbox.put)
        except BaseException:
            outbox.request_ids.discard(request.request_id)
            raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody waits for any more; unknown ones have ended already."""
        for request_id in request_ids:
            self._engine.abort(request_id)

    async def close(self) -> None:
        """End the engine, and return when gateways have been told of those that were under way."""
        await self._engine.close()
        while any(outbox.is_filled for outbox in self._outboxes.values()):  # noqa: ASYNC110 - of many, and once
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(POLL_SECONDS)  # what was taken is on its way

    async def outputs(self, stream: str) -> AsyncIterator[bytes]:
        """All tokens of a stream's requests, an item a step, and a heartbeat when there are none.

        Items are packed: see `packing`. Ends after an hour; what is not delivered by then goes to
        the next stream of that name.
        """
        outbox = self._outbox(stream)
        end = time.monotonic() + STREAM_SECONDS
        told: frozenset[int] = frozenset()
        while time.monotonic() < end:
            deltas = await outbox.take(patience_seconds=HEARTBEAT_SECONDS)
            load, prefixes = self._engine.load(), self._engine.prefixes()
            if prefixes is not told:
                load, told = replace(load, prefixes=prefixes), prefixes
            yield pack_outputs(OutputBatch(self._engine_id, deltas, load))

    async def probe(self, *, timeout_seconds: float) -> None:
        """Return when the engine is seen to make progress.

        A busy engine has to finish a step that was not finished at the last probe; an idle one
        has to generate a token, unless it did a moment ago. Raises TargetUnavailable.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._progress()
        except TimeoutError:
            raise TargetUnavailable(f"no progress in {timeout_seconds} s") from None

    async def _progress(self) -> None:
        while (num_steps := self._num_finished_steps()) <= self._num_probed_steps:
            if self._busy():
                await asyncio.sleep(POLL_SECONDS)
            elif time.monotonic() - self._last_progress < FRESH_SECONDS:
                return
            else:
                await self._generate_one_token()
        self._num_probed_steps = num_steps
        self._last_progress = time.monotonic()

    def _busy(self) -> bool:
        load = self._engine.load()
        return load.running + load.waiting > 0

    def _num_finished_steps(self) -> int:
        """Steps that are certainly over: while there is work the latest may be under way."""
        return self._engine.load().step_id - self._busy()

    async def _generate_one_token(self) -> None:
        async for delta in self._engine.generate(PROBE):
            if not delta.token_ids:
                raise TargetUnavailable(f"a probe ended without a token: {delta.error}")

    def _outbox(self, stream: str) -> Outbox:
        return self._outboxes.setdefault(stream, Outbox())

    async def _give_up_gone_gateways(self) -> None:
        while True:
            await asyncio.sleep(GONE_SECONDS / 5)
            for stream, outbox in list(self._outboxes.items()):
                if outbox.silent_seconds > GONE_SECONDS:
                    logger.warning("gateway stream %s is gone", stream)
                    del self._outboxes[stream]
                    for request_id in list(outbox.request_ids):
                        self._engine.abort(request_id)


class EngineActor(EngineHost):
    """The host as an actor that builds its engine. `engine_id` is new for every start."""

    async def __init__(  # type: ignore[misc]  # Ray awaits the constructor of an async actor
        self, config: DrafthouseConfig, *, engine_id: str
    ) -> None:
        # Supervisors know this class too, and have no use for torch: only an engine loads it.
        from cluster.actors.target import compute_side  # noqa: PLC0415
        from cluster.local import build_engine, in_passing_thread  # noqa: PLC0415

        setup_logging(engine_id, config.observability)
        self._registry = CollectorRegistry()
        self._remote_drafters = _remote_drafters(config, engine_id=engine_id)
        ranks = None
        if config.target.tensor_parallel_size > 1:
            ranks = await compute_side(config, engine_id=engine_id)
        local = await in_passing_thread(
            lambda: build_engine(
                config,
                registry=self._registry,
                remote_drafters=self._remote_drafters,
                ranks=ranks,
            )
        )
        self._info = local.info
        freeze_loaded()
        super().__init__(local.engine, engine_id=engine_id)

    async def info(self) -> ModelInfo:
        """What is served here."""
        return self._info

    async def metrics(self) -> tuple[Family, ...]:
        """Everything this process has counted."""
        return collect(self._registry)

    async def set_draft_workers(self, workers: Mapping[str, Member]) -> None:
        """Draft with these workers, by worker id, from the next step on: each in its pool."""
        for pool, drafter in self._remote_drafters.items():
            own = {name: worker for name, worker in workers.items() if worker.pool == pool}
            drafter.set_workers(
                {name: worker.handle for name, worker in own.items()},
                num_sequences={
                    name: worker.load.num_sequences
                    for name, worker in own.items()
                    if isinstance(worker.load, DraftLoad)
                },
            )


def _remote_drafters(config: DrafthouseConfig, *, engine_id: str) -> dict[str, RemoteDrafter]:
    """The way to each pool of draft workers."""
    return {
        model.pool: RemoteDrafter(
            model.pool,
            engine_id=engine_id,
            context_limit=model.max_model_len,
            rule=Rule(config.speculation.verification),
            most_seconds=config.speculation.draft_deadline_seconds,
            weighs=config.speculation.policy == "adaptive",
        )
        for model in draft_models(config.drafter)
        if model.in_workers
    }
