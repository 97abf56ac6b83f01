"""What an engine has to tell one gateway and has not told yet.

Bounded by construction: at most one delta a request waits, since a later one is joined to it. A
gateway that keeps pace gets every step by itself; a slow one gets more tokens at a time.
"""

import asyncio
import time
from collections.abc import Callable

from cluster.messages import TokenDelta

HEARTBEAT_SECONDS = (
    0.5  # after which an empty item goes out: each side hears that the other is there
)


def joined(earlier: TokenDelta, later: TokenDelta) -> TokenDelta:
    """Two deltas of one request as one, as if both steps had been one."""
    return TokenDelta(
        request_id=earlier.request_id,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        num_drafted=earlier.num_drafted + later.num_drafted,
        num_accepted=earlier.num_accepted + later.num_accepted,
        finish_reason=later.finish_reason,
        error=later.error,
    )


class Outbox:
    """The waiting deltas of one gateway, and which requests are under way for it.

    `put` never blocks. `take` waits. Both run in the engine's event loop.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, TokenDelta] = {}
        self._filled = asyncio.Event()
        self._last_taken = clock()
        self.request_ids: set[str] = set()

    @property
    def silent_seconds(self) -> float:
        """How long nobody has come for anything."""
        return self._clock() - self._last_taken

    def put(self, delta: TokenDelta) -> None:
        """Leave a delta for the gateway."""
        earlier = self._waiting.get(delta.request_id)
        self._waiting[delta.request_id] = joined(earlier, delta) if earlier else delta
        if delta.finish_reason is not None:
            self.request_ids.discard(delta.request_id)
        self._filled.set()

    async def take(self, *, patience_seconds: float) -> tuple[TokenDelta, ...]:
        """Everything that waits, in order of arrival; empty after `patience_seconds` of nothing."""
        self._last_taken = self._clock()
        try:
            async with asyncio.timeout(patience_seconds):
                await self._filled.wait()
        except TimeoutError:
            return ()
        finally:
            self._last_taken = self._clock()
        deltas = tuple(self._waiting.values())
        self._waiting.clear()
        self._filled.clear()
        return deltas
