"""Text deltas joined on their way out: every chunk costs a proxy a millisecond."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TypeVar

from cluster.text.stream import TextDelta

T = TypeVar("T")
CHUNK_SECONDS = 0.05  # between chunks, unless they are long
CHUNK_TOKENS = 16  # held back at most, of all answers together


def joined(first: TextDelta, second: TextDelta) -> TextDelta:
    """Two deltas of one answer as if they had come at once."""
    return TextDelta(
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens or second.num_cached_tokens,
        num_steps=first.num_steps + second.num_steps,
        num_drafted=first.num_drafted + second.num_drafted,
        num_accepted=first.num_accepted + second.num_accepted,
        finish_reason=second.finish_reason,
    )


class _Pending:
    """What has come and not gone out yet: one delta for each answer."""

    def __init__(self) -> None:
        self._deltas: dict[int, TextDelta] = {}
        self._begun: set[int] = set()
        self.arrived = asyncio.Event()
        self.urgent = asyncio.Event()

    def add(self, index: int, delta: TextDelta) -> None:
        """Take one in. An answer's first tokens and its end do not wait."""
        before = self._deltas.get(index)
        self._deltas[index] = delta if before is None else joined(before, delta)
        num_tokens = sum(len(held.token_ids) for held in self._deltas.values())
        is_first = index not in self._begun
        if is_first or delta.finish_reason is not None or num_tokens >= CHUNK_TOKENS:
            self.urgent.set()
        self._begun.add(index)
        self.arrived.set()

    def end(self) -> None:
        """Nothing more comes."""
        self.arrived.set()
        self.urgent.set()

    def take(self) -> list[tuple[int, TextDelta]]:
        """All of it."""
        taken = list(self._deltas.items())
        self._deltas.clear()
        self.arrived.clear()
        self.urgent.clear()
        return taken


async def paced(
    deltas: AsyncGenerator[tuple[int, TextDelta, T], None],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """The same text with fewer deltas, CHUNK_SECONDS apart; none waits when none went before it.

    Closing this closes `deltas`; their error comes after all that came before it.
    """
    pending = _Pending()

    async def read() -> None:
        async with aclosing(deltas):
            async for index, delta, _ in deltas:
                pending.add(index, delta)

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: pending.end())
    clock = asyncio.get_running_loop().time
    due = clock()
    try:
        while True:
            await pending.arrived.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await pending.urgent.wait()
            is_over = reading.done()
            taken = pending.take()
            due = clock() + CHUNK_SECONDS
            for index, delta in taken:
                yield index, delta
            if is_over:
                reading.result()
                return
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
