"""What requests brought and when, as whoever waits for the tokens sees it."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.engine.engine import Engine
from cluster.errors import TargetUnavailable
from cluster.messages import TokenDelta
from cluster.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came together, `seconds` on the clock of time.perf_counter."""

    seconds: float
    num_tokens: int


@dataclass(slots=True)
class Stream:
    """One request's answer as it came; `submitted` is on the same clock as the arrivals."""

    submitted: float
    arrivals: list[Arrival] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)  # (drafted, kept), by arrival
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached_tokens: int = 0

    def add(self, delta: TokenDelta) -> None:
        """Take in what came now. Raises TargetUnavailable for a request that failed."""
        if delta.finish_reason is FinishReason.ERROR:
            raise TargetUnavailable(f"request {delta.request_id}: {delta.error}")
        if delta.token_ids:
            self.arrivals.append(Arrival(time.perf_counter(), len(delta.token_ids)))
            self.drafts.append((delta.num_drafted, delta.num_accepted))
        self.token_ids += delta.token_ids
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        self.num_cached_tokens += delta.num_cached_tokens

    async def follow(self, deltas: AsyncIterator[TokenDelta]) -> None:
        """Take in everything to the end. Raises TargetUnavailable for a request that failed."""
        async for delta in deltas:
            self.add(delta)

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def first_token_seconds(self) -> float:
        """From the submission to the first token."""
        return self.arrivals[0].seconds - self.submitted

    def inter_token_seconds(
        self, begin: float = -math.inf, end: float = math.inf
    ) -> Iterator[float]:
        """One time a token after the first arrival: the gap before it, over the tokens it brought.

        Tokens that come together share the wait for them, so the times of an answer add up to it.
        Only gaps that lie partly between `begin` and `end` count.
        """
        for before, now in pairwise(self.arrivals):
            if before.seconds < end and now.seconds > begin:
                yield from [(now.seconds - before.seconds) / now.num_tokens] * now.num_tokens


async def run_together(engine: Engine, requests: Sequence[Request]) -> list[Stream]:
    """All requests at once, to the last token of the last one."""
    now = time.perf_counter()
    streams = [Stream(now) for _ in requests]
    pairs = zip(streams, requests, strict=True)
    await asyncio.gather(*(stream.follow(engine.generate(request)) for stream, request in pairs))
    return streams
