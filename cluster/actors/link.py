"""One gateway's connection to one engine: requests go up by calls, all tokens come by one stream.

connecting ──first item──> accepting <──> stalled       (no item, or no step, for too long:
     │                         │ retire()                its requests move, it stays)
     └──────── broken ─────────┴─> finishing ──last request ended──> closed
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from cluster.actors.calls import ask_target
from cluster.actors.outbox import HEARTBEAT_SECONDS
from cluster.actors.packing import unpack_outputs
from cluster.control.routing import Sent, Standing
from cluster.errors import TargetUnavailable
from cluster.messages import EngineLoad, ModelInfo, OutputBatch, TokenDelta
from cluster.request import FinishReason, Request

logger = logging.getLogger(__name__)

STREAM_ITEMS_AHEAD = 8  # items this side may be behind before the engine joins its deltas
SILENT_SECONDS = 10 * HEARTBEAT_SECONDS  # without an item: new requests are not sent there
STALLED_SECONDS = 5 * HEARTBEAT_SECONDS  # without an item: an engine that is heard is better
STUCK_SECONDS = 5.0  # without a step while there is work,
USUAL_STEPS = 20.0  # or so many times what one usually takes

Arrival = TokenDelta | Exception


class EngineStalled(TargetUnavailable):
    """The engine is there and does nothing, and another is at hand."""


class EngineLink:
    """Carries the requests of one gateway to one engine, from inside an event loop.

    `stream` names the stream of tokens and must never have been used before. `on_change` is
    called when the engine begins to accept requests, and when the link is closed.
    """

    def __init__(
        self, engine_id: str, handle: ActorHandle, *, stream: str, on_change: Callable[[], None]
    ) -> None:
        self._engine_id = engine_id
        self._handle = handle
        self._stream = stream
        self._on_change = on_change
        self._numbers = itertools.count()
        self._arrivals: dict[str, asyncio.Queue[Arrival]] = {}
        self._heard = float("-inf")
        self._stepped = float("-inf")
        self._load = EngineLoad(running=0, waiting=0, free_blocks=0, step_id=0)
        self._prefixes: frozenset[int] = frozenset()
        self._sent = Sent()
        self._retired = False
        self.died = False  # for good: an engine that starts again has another id
        self.info: ModelInfo | None = None  # in the engine's words, once it has answered
        self._reading = asyncio.create_task(self._read())

    @property
    def engine_id(self) -> str:
        """The engine's."""
        return self._engine_id

    @property
    def accepts(self) -> bool:
        """Whether new requests may be sent: the engine was heard of a moment ago."""
        silent_seconds = time.monotonic() - self._heard
        return not (self._retired or self.closed) and silent_seconds < SILENT_SECONDS

    @property
    def stalled(self) -> str | None:
        """What is wrong with an engine that is there and does nothing, if it is so."""
        now = time.monotonic()
        if now - self._heard > STALLED_SECONDS:
            return f"silent for {now - self._heard:.1f} s"
        most = max(STUCK_SECONDS, USUAL_STEPS * self._load.step_seconds)
        if self._load.running and now - self._stepped > most:
            return f"in one step for {now - self._stepped:.1f} s"
        return None

    @property
    def closed(self) -> bool:
        """Whether nothing will come from the engine any more."""
        return self._reading.done()

    @property
    def load(self) -> int:
        """Sequences that run or wait at the engine, as far as it is known here."""
        return self.standing.num_held

    @property
    def standing(self) -> Standing:
        """The engine as far as it is known here."""
        return Standing(
            engine_id=self._engine_id,
            load=self._load,
            prefixes=self._prefixes,
            num_sent=self._sent.num_sequences,
            sent_tokens=self._sent.num_tokens,
        )

    @property
    def num_under_way(self) -> int:
        """Requests that wait for what the engine brings."""
        return len(self._arrivals)

    def retire(self) -> None:
        """Send no new requests, and close when those under way have ended."""
        self._retired = True
        if not self._arrivals:
            self.close()

    def abandon(self, reason: str) -> None:
        """Have the requests under way go on elsewhere; what still comes for them is dropped."""
        logger.warning(
            "engine %s: %s; its requests move: %d", self._engine_id, reason, self.num_under_way
        )
        self._end_arrivals(EngineStalled(reason))

    def close(self) -> None:
        """Stop reading. What was under way is lost to its callers."""
        self._retired = True
        self._reading.cancel()

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to the one with a finish reason. Closing it aborts.

        The engine knows the request by a name of the link's own: two clients may use one id.
        Raises what Engine.submit raises, and TargetUnavailable when the engine cannot go on.
        """
        if self.closed:
            raise TargetUnavailable(f"the link to engine {self._engine_id} is closed")
        inner_id = f"{self._stream}.{next(self._numbers)}"
        logger.debug("request %s is %s there", request.request_id, inner_id)
        arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._arrivals[inner_id] = arrivals
        self._sent.expect(inner_id, len(request.prompt_token_ids) + len(request.output_token_ids))
        # Beside the tokens: an engine that is stopped answers neither, and must not hold us.
        submitting = asyncio.create_task(
            self._submit(replace(request, request_id=inner_id), arrivals)
        )
        finished = False
        try:
            while not finished:
                delta = _delta(await arrivals.get())
                finished = delta.finish_reason is not None
                yield replace(delta, request_id=request.request_id)
        finally:
            submitting.cancel()
            self._sent.forget(inner_id)
            self._arrivals.pop(inner_id, None)
            if not finished:
                self._handle.abort.remote([inner_id])
            if self._retired and not self._arrivals:
                self.close()

    async def _submit(self, request: Request, arrivals: asyncio.Queue[Arrival]) -> None:
        try:
            await ask_target(self._handle.submit.remote(self._stream, request))
        except TargetUnavailable as error:
            arrivals.put_nowait(error)
            self.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller waits for it
            arrivals.put_nowait(error)
        else:
            self._sent.taken(request.request_id)

    async def _read(self) -> None:
        reason = "the link was closed"
        try:
            self.info = await self._handle.info.remote()
            while True:  # the engine ends a stream now and then, to be opened again
                await self._read_stream()
        except RayError as error:
            self.died = isinstance(error, ActorDiedError)
            reason = f"the engine is gone: {type(error).__name__}"
            logger.warning(
                "engine %s: %s; its requests move: %d", self._engine_id, reason, self.num_under_way
            )
        finally:
            self._end_arrivals(TargetUnavailable(reason))
            self._on_change()

    def _end_arrivals(self, error: TargetUnavailable) -> None:
        for arrivals in self._arrivals.values():
            arrivals.put_nowait(error)
        self._arrivals.clear()

    async def _read_stream(self) -> None:
        items = self._handle.outputs.options(
            num_returns="streaming", _generator_backpressure_num_objects=STREAM_ITEMS_AHEAD
        ).remote(self._stream)
        try:
            async for item in items:
                self._take(unpack_outputs(await item))
        except asyncio.CancelledError:
            ray.cancel(items)
            raise

    def _take(self, batch: OutputBatch) -> None:
        accepted = self.accepts
        self._heard = time.monotonic()
        if batch.load.step_id != self._load.step_id or not batch.load.running:
            self._stepped = self._heard
        self._load = batch.load
        if batch.load.prefixes is not None:
            self._prefixes = batch.load.prefixes
        self._sent.told()
        for delta in batch.deltas:
            arrivals = self._arrivals.get(delta.request_id)
            if arrivals is not None:
                arrivals.put_nowait(delta)
        if not accepted:
            self._on_change()


def _delta(arrival: Arrival) -> TokenDelta:
    """The delta that arrived. Raises the error that did, and one for the end of the engine."""
    match arrival:
        case Exception():
            raise arrival
        case TokenDelta(finish_reason=FinishReason.ERROR):
            raise TargetUnavailable(arrival.error or "the engine could not go on")
        case TokenDelta():
            return arrival
