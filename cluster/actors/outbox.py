"""What an engine has to tell one gateway and has not told yet.

Bounded by construction: of each request at most MAX_WAITING deltas wait, and later ones are joined
to the last. A gateway that keeps pace gets every step by itself; a slow one gets more tokens at a
time.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import chain

from cluster.messages import TokenDelta

HEARTBEAT_SECONDS = 0.5  # after which an empty item goes out, so that each side hears the other
MAX_WAITING = 8


def joined(earlier: TokenDelta, later: TokenDelta) -> TokenDelta:
    """Two deltas of one request as one; it tells of how many steps that gave tokens it is."""
    return TokenDelta(
        request_id=earlier.request_id,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        top_logprobs=earlier.top_logprobs + later.top_logprobs,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
        num_cached_tokens=earlier.num_cached_tokens + later.num_cached_tokens,
        num_steps=sum(delta.num_steps for delta in (earlier, later) if delta.token_ids),
        num_drafted=earlier.num_drafted + later.num_drafted,
        num_accepted=earlier.num_accepted + later.num_accepted,
        finish_reason=later.finish_reason,
        error=later.error,
        traced_steps=earlier.traced_steps + later.traced_steps,
        emitted_at=earlier.emitted_at or later.emitted_at,
    )


class Outbox:
    """The waiting deltas of one gateway, and which requests are under way for it.

    Of each request at most `max_waiting` wait. `put` never blocks. `take` waits. Both run in the
    engine's event loop.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, max_waiting: int = MAX_WAITING
    ) -> None:
        self._clock = clock
        self._max_waiting = max_waiting
        self._waiting: dict[str, list[TokenDelta]] = {}
        self._filled = asyncio.Event()
        self._last_taken = clock()
        self.request_ids: set[str] = set()

    @property
    def silent_seconds(self) -> float:
        """How long nobody has come for anything."""
        return self._clock() - self._last_taken

    @property
    def is_filled(self) -> bool:
        """Whether something waits."""
        return self._filled.is_set()

    def put(self, delta: TokenDelta) -> None:
        """Leave a delta for the gateway."""
        waiting = self._waiting.setdefault(delta.request_id, [])
        if len(waiting) < self._max_waiting:
            waiting.append(delta)
        else:
            waiting[-1] = joined(waiting[-1], delta)
        if delta.finish_reason is not None:
            self.request_ids.discard(delta.request_id)
        self._filled.set()

    async def take(self, *, patience_seconds: float) -> tuple[TokenDelta, ...]:
        """Everything that waits, each request's in order; empty after that long of nothing."""
        self._last_taken = self._clock()
        try:
            async with asyncio.timeout(patience_seconds):
                await self._filled.wait()
        except TimeoutError:
            return ()
        finally:
            self._last_taken = self._clock()
        deltas = tuple(chain.from_iterable(self._waiting.values()))
        self._waiting.clear()
        self._filled.clear()
        return deltas
