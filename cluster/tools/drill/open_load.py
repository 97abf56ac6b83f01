"""Clients that come whether or not there is room, and what became of each."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.tools.drill.client import Disconnected, Failed, Piece, Refused
from cluster.tools.drill.mix import Message, Mix, Order, Sort
from cluster.tools.drill.streams import MOST_MESSAGES, Check

INVALID, LATE = "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"


class Client(Protocol):
    """Sends a request somewhere."""

    def stream(
        self, message: Message, *, deadline_seconds: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The answer's pieces. Raises Disconnected, Refused and Failed."""
        ...


class End(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    CANCELLED = "cancelled"  # by its client
    REFUSED = "refused"  # told when to come again
    LATE = "late"  # its deadline passed
    INVALID = "invalid"
    DISCONNECTED = "disconnected"  # its gateway went
    FAILED = "failed"


EXPECTED: dict[Sort, frozenset[End]] = {
    Sort.PLAIN: frozenset({End.ANSWERED, End.REFUSED}),
    Sort.CANCEL: frozenset({End.CANCELLED, End.REFUSED}),
    Sort.DEADLINE: frozenset({End.ANSWERED, End.REFUSED, End.LATE}),
    Sort.BAD: frozenset({End.INVALID}),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """One request. `begun` says whether a token came; `num_wrong` are tokens lost or changed."""

    sort: Sort
    end: End
    seconds: float
    begun: bool
    num_wrong: int = 0
    message: str = ""

    @property
    def expected(self) -> bool:
        """Whether that is how such a request may end; what has begun is not refused any more."""
        if self.end is End.REFUSED and self.begun:
            return False
        return self.end in EXPECTED[self.sort] | {End.DISCONNECTED}


@dataclass
class OpenLoad:
    """Sends what the mix draws, `rate` a second, and notes how it ended."""

    client: Client
    mix: Mix
    ended: list[Ended] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)  # of ends that must not be
    num_open: int = 0

    async def run(self, *, rate: float, seconds: float) -> None:
        """For so long; returns when all have ended."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end:
                group.create_task(self._one(self.mix.draw()))
                await asyncio.sleep(self.mix.pause(rate))

    async def _one(self, order: Order) -> None:
        self.num_open += 1
        try:
            ended = await send(self.client, order)
        finally:
            self.num_open -= 1
        self.ended.append(ended)
        if not ended.expected and len(self.messages) < MOST_MESSAGES:
            self.messages.append(f"{ended.sort}: {ended.end}: {ended.message}")


async def send(client: Client, order: Order) -> Ended:
    """One request to its end."""
    start = time.monotonic()
    check = Check(order.expected)
    num_changed = 0

    def ended(end: End, message: str = "", *, num_lost: int = 0) -> Ended:
        return Ended(
            order.sort,
            end,
            time.monotonic() - start,
            check.num_tokens > 0,
            num_changed + num_lost,
            message,
        )

    pieces = client.stream(order.message, deadline_seconds=order.deadline_seconds)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                num_changed += check.take(piece)
                if order.cancel_after is not None and check.num_tokens >= order.cancel_after:
                    return ended(End.CANCELLED)
    except Refused as error:
        return ended(End.REFUSED, str(error))
    except Disconnected as error:
        return ended(End.DISCONNECTED, str(error))
    except Failed as error:
        known = {INVALID: End.INVALID, LATE: End.LATE}
        return ended(known.get(error.code, End.FAILED), str(error))
    return ended(End.ANSWERED, num_lost=check.num_lost)


async def measure_capacity(client: Client, mix: Mix, *, num_lanes: int, seconds: float) -> float:
    """Requests of the mix a second that are served when so many are always open."""
    end = time.monotonic() + seconds
    served = 0

    async def lane() -> None:
        nonlocal served
        while time.monotonic() < end:
            ended = await send(client, mix.draw())
            served += ended.end is not End.REFUSED

    start = time.monotonic()
    await asyncio.gather(*(lane() for _ in range(num_lanes)))
    return served / (time.monotonic() - start)
