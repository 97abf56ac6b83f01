"""Remote engines behind the one method of a local engine: `generate(request)`.

request ──> the engine that ──> tokens ... engine dies, or does nothing while others do
            should end first                      │
            another engine, or the replacement <──┘  prompt + tokens so far, same seed:
                                                     nothing lost, nothing doubled
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from math import inf

from ray.actor import ActorHandle

from cluster.actors.link import EngineLink, EngineStalled
from cluster.control.routing import Need, choose, need_of
from cluster.errors import Overloaded, TargetUnavailable
from cluster.messages import ModelInfo, TokenDelta
from cluster.request import Request

logger = logging.getLogger(__name__)

MAX_MOVES = 5  # engines one request may see die: more, and it is suspected of killing them
WATCH_SECONDS = 0.25
MOST_PAUSE_SECONDS = 0.5  # before a request that has begun tries full engines again
DEADLINE_MARGIN_SECONDS = 0.1  # in which the caller can still be told


class EnginePool:
    """The engines of one gateway. `gateway_id` is new for every start of a gateway.

    `configured` describes the model until an engine has described itself. A request that was
    under way when its engine died waits up to `patience_seconds` for another; a new request is
    refused at once when there is none. `on_move` is called for each request that goes on elsewhere.
    """

    def __init__(
        self,
        gateway_id: str,
        configured: ModelInfo,
        *,
        patience_seconds: float = 60.0,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        self._gateway_id = gateway_id
        self._info = configured
        self._patience_seconds = patience_seconds
        self._on_move = on_move
        self._num_links = 0
        self._links: dict[str, EngineLink] = {}
        self._dead: set[str] = set()  # told of by membership, and known to be gone
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def ready(self) -> bool:
        """Whether some engine takes requests now."""
        return any(link.accepts for link in self._links.values())

    def lowest_load(self) -> int | None:
        """Sequences at the engine that has the fewest, as far as it is known; None without one."""
        return min((link.load for link in self._links.values() if link.accepts), default=None)

    @property
    def num_under_way(self) -> int:
        """Requests that wait for what an engine brings."""
        return sum(link.num_under_way for link in self._links.values())

    def describe(self) -> ModelInfo:
        """What the engines serve, in the words of the one that was asked last."""
        for link in self._links.values():
            self._info = link.info or self._info
        return self._info

    def set_engines(self, handles: Mapping[str, ActorHandle]) -> None:
        """Use these engines from now on, by engine id.

        An engine that is not among them any more gets no new requests and finishes those it has.
        """
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        for engine_id, link in list(self._links.items()):
            if engine_id not in handles:
                link.retire()
            if link.closed:  # a broken link to an engine that is still there is made anew
                del self._links[engine_id]
                if link.died:
                    self._dead.add(engine_id)
        self._dead &= handles.keys()
        for engine_id in handles.keys() - self._links.keys() - self._dead:
            self._num_links += 1
            self._links[engine_id] = EngineLink(
                engine_id,
                handles[engine_id],
                stream=f"{self._gateway_id}.{self._num_links}",
                on_change=self._changed.set,
            )

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to the one with a finish reason. Closing it aborts.

        Raises what Engine.submit raises, Overloaded when no engine should begin in time, and
        TargetUnavailable when no engine can go on.
        """
        journey = _Journey(request, patience_seconds=self._patience_seconds)
        link = self._choose(journey)
        while True:
            try:
                async with aclosing(link.generate(journey.rest())) as deltas:
                    async for delta in deltas:
                        journey.arrived(delta)
                        yield delta
                        if delta.finish_reason is not None:
                            return
            except Overloaded as full:  # told by the engine: more were sent than is known here
                journey.refused(link, full)
                link = await self._other(journey)
                continue
            except TargetUnavailable as lost:
                journey.lost(lost)
                logger.debug("request %s moves: %s", request.request_id, lost)
            link = await self._other(journey)
            self._on_move()

    def close(self) -> None:
        """Let go of every engine."""
        if self._watching is not None:
            self._watching.cancel()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _choose(self, journey: "_Journey") -> EngineLink:
        """The engine to go to. Raises TargetUnavailable and Overloaded."""
        links = [link for link in self._links.values() if link.accepts]
        links = [link for link in links if link.stalled is None] or links
        by_id = {link.engine_id: link for link in links if link not in journey.full}
        if links and not by_id:
            raise journey.why_full
        standings = [link.standing for link in by_id.values()]
        return by_id[choose(standings, journey.need()).engine_id]

    async def _other(self, journey: "_Journey") -> EngineLink:
        """An engine to go on with. One that has begun waits for it, while its patience lasts."""
        if not journey.moved:
            return self._choose(journey)
        try:
            async with asyncio.timeout(journey.patience_left):
                while True:
                    self._changed.clear()
                    try:
                        return self._choose(journey)
                    except TargetUnavailable:
                        await self._changed.wait()
                    except Overloaded as full:
                        await asyncio.sleep(min(full.retry_seconds, MOST_PAUSE_SECONDS))
                        journey.full.clear()
        except TimeoutError:
            raise TargetUnavailable(
                f"the target is gone and none came in {journey.patience_seconds} s"
            ) from None

    async def _watch(self) -> None:
        """Move what is under way from engines that do nothing to one that does."""
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            if time.monotonic() - slept_at > 2 * WATCH_SECONDS:
                continue  # it is this process that was held up
            links = [link for link in self._links.values() if not link.closed]
            if not any(link.accepts and link.stalled is None for link in links):
                continue
            for link in links:
                if link.num_under_way and (reason := link.stalled) is not None:
                    link.abandon(reason)


class _Journey:
    """One request on its way through engines."""

    def __init__(self, request: Request, *, patience_seconds: float) -> None:
        self._request = request
        self._output_token_ids = list(request.output_token_ids)
        self._num_moves = 0
        self._num_tokens_at_move = 0
        self._end = inf
        self.patience_seconds = patience_seconds
        if request.deadline_seconds is not None:
            self._end = time.monotonic() + request.deadline_seconds
        self.patience_end = inf
        self.moved = False
        self.full: set[EngineLink] = set()
        self.why_full = Overloaded(waiting=0, limit=0)

    @property
    def patience_left(self) -> float:
        """Seconds that another engine is waited for, which end before the deadline does."""
        deadline = self._end - DEADLINE_MARGIN_SECONDS
        return max(min(self.patience_end, deadline) - time.monotonic(), 0.0)

    def rest(self) -> Request:
        """What is still to be done."""
        return replace(
            self._request,
            output_token_ids=tuple(self._output_token_ids),
            deadline_seconds=self._deadline_seconds(),
        )

    def need(self) -> Need:
        """What that takes; a request that has begun is not turned away for being late."""
        need = need_of(self.rest())
        return replace(need, deadline_seconds=None) if self.moved else need

    def arrived(self, delta: TokenDelta) -> None:
        """Keep what came."""
        self._output_token_ids += delta.token_ids

    def refused(self, link: EngineLink, error: Overloaded) -> None:
        """An engine has no room; it is not asked again at once."""
        self.full.add(link)
        self.why_full = error

    def lost(self, error: TargetUnavailable) -> None:
        """An engine is lost. Raises the error when it was one too many.

        Those that only stalled do not count, as long as some give tokens.
        """
        num_tokens = len(self._output_token_ids)
        if not isinstance(error, EngineStalled) or num_tokens == self._num_tokens_at_move:
            self._num_moves += 1
        self._num_tokens_at_move = num_tokens
        if self._num_moves > MAX_MOVES:
            raise error
        self.moved = True
        self.full.clear()
        self.patience_end = time.monotonic() + self.patience_seconds

    def _deadline_seconds(self) -> float | None:
        if self._request.deadline_seconds is None:
            return None
        return max(self._end - time.monotonic(), 0.0)
