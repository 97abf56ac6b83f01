"""One gateway's connection to one engine: requests go up by calls, all tokens come by one stream.

connecting ──first item──> accepting <──> silent        (no item for SILENT_SECONDS)
     │                         │ retire()
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
from ray.exceptions import RayError

from cluster.actors.calls import ask_target
from cluster.actors.outbox import HEARTBEAT_SECONDS
from cluster.errors import TargetUnavailable
from cluster.messages import ModelInfo, OutputBatch, TokenDelta
from cluster.request import FinishReason, Request

logger = logging.getLogger(__name__)

STREAM_ITEMS_AHEAD = 8  # items this side may be behind before the engine joins its deltas
SILENT_SECONDS = 10 * HEARTBEAT_SECONDS

Arrival = TokenDelta | TargetUnavailable


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
        self._busy = 0  # sequences at the last item, and those sent since
        self._retired = False
        self.info: ModelInfo | None = None  # in the engine's words, once it has answered
        self._reading = asyncio.create_task(self._read())

    @property
    def accepts(self) -> bool:
        """Whether new requests may be sent: the engine was heard of a moment ago."""
        silent_seconds = time.monotonic() - self._heard
        return not (self._retired or self.closed) and silent_seconds < SILENT_SECONDS

    @property
    def closed(self) -> bool:
        """Whether nothing will come from the engine any more."""
        return self._reading.done()

    @property
    def load(self) -> int:
        """Sequences that run or wait at the engine, as far as it is known here."""
        return self._busy

    def retire(self) -> None:
        """Send no new requests, and close when those under way have ended."""
        self._retired = True
        if not self._arrivals:
            self.close()

    def close(self) -> None:
        """Stop reading. What was under way is lost to its callers."""
        self._retired = True
        self._reading.cancel()

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to the one with a finish reason. Closing it aborts.

        The engine knows the request by a name of the link's own: two clients may use one id.
        Raises what Engine.submit raises, and TargetUnavailable when the engine cannot go on.
        """
        inner_id = f"{self._stream}.{next(self._numbers)}"
        arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._arrivals[inner_id] = arrivals
        finished = False
        try:
            await self._submit(replace(request, request_id=inner_id))
            while not finished:
                delta = _delta(await arrivals.get())
                finished = delta.finish_reason is not None
                yield replace(delta, request_id=request.request_id)
        finally:
            del self._arrivals[inner_id]
            if not finished:
                self._handle.abort.remote([inner_id])
            if self._retired and not self._arrivals:
                self.close()

    async def _submit(self, request: Request) -> None:
        if self.closed:
            raise TargetUnavailable(f"the link to engine {self._engine_id} is closed")
        self._busy += 1
        try:
            await ask_target(self._handle.submit.remote(self._stream, request))
        except TargetUnavailable:
            self.close()
            raise

    async def _read(self) -> None:
        reason = "the link was closed"
        try:
            self.info = await self._handle.info.remote()
            while True:  # the engine ends a stream now and then, to be opened again
                await self._read_stream()
        except RayError as error:
            reason = f"the engine is gone: {type(error).__name__}"
            logger.warning("engine %s: %s", self._engine_id, reason)
        finally:
            for arrivals in self._arrivals.values():
                arrivals.put_nowait(TargetUnavailable(reason))
            self._on_change()

    async def _read_stream(self) -> None:
        items = self._handle.outputs.options(
            num_returns="streaming", _generator_backpressure_num_objects=STREAM_ITEMS_AHEAD
        ).remote(self._stream)
        try:
            async for item in items:
                self._take(await item)
        except asyncio.CancelledError:
            ray.cancel(items)
            raise

    def _take(self, batch: OutputBatch) -> None:
        accepted = self.accepts
        self._heard = time.monotonic()
        self._busy = batch.load.running + batch.load.waiting
        for delta in batch.deltas:
            arrivals = self._arrivals.get(delta.request_id)
            if arrivals is not None:
                arrivals.put_nowait(delta)
        if not accepted:
            self._on_change()


def _delta(arrival: Arrival) -> TokenDelta:
    """The delta that arrived. Raises TargetUnavailable for the end of the engine instead."""
    match arrival:
        case TargetUnavailable():
            raise arrival
        case TokenDelta(finish_reason=FinishReason.ERROR):
            raise TargetUnavailable(arrival.error or "the engine could not go on")
        case TokenDelta():
            return arrival
