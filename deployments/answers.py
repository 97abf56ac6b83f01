"""The answers of one call: their text deltas mixed as they come, and all of them together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from cluster.request import FinishReason, Request
from cluster.text.answer import Answer

T = TypeVar("T")


class Answers:
    """What the requests of one call have brought so far, an `Answer` for each."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.num_prompt_tokens = len(requests[0].prompt_token_ids)
        self.each = tuple(
            Answer(num_prompt_tokens=self.num_prompt_tokens, seed=request.sampling.seed)
            for request in requests
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.each)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while an answer goes on; STOP when all were stopped; else what ended another."""
        reasons = {answer.finish_reason for answer in self.each}
        if None in reasons:
            return None
        return next(
            (reason for reason in reasons if reason is not FinishReason.STOP), FinishReason.STOP
        )


async def interleaved(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's place.

    Closing this closes all streams, and so does the first error, which is raised.
    """
    if len(streams) == 1:  # as nearly always: there is nothing to mix
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def read(place: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                arrivals.put_nowait((place, item))

    readers = [asyncio.create_task(read(*placed)) for placed in enumerate(streams)]
    for reader in readers:
        reader.add_done_callback(arrivals.put_nowait)
    try:
        num_open = len(readers)
        while num_open:
            match await arrivals.get():
                case asyncio.Task() as ended:
                    ended.result()
                    num_open -= 1
                case arrived:
                    yield arrived
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
