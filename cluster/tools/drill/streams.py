"""Streams that are always in flight, each compared token by token with what it must be."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from typing import Protocol

from cluster.tools.drill.client import Disconnected, Failed, Piece, Refused
from cluster.tools.drill.questions import Answer, Question

MOST_MESSAGES = 20


class Client(Protocol):
    """Asks somewhere."""

    def ask(self, question: Question) -> AsyncGenerator[Piece, None]:
        """The answer's pieces. Raises Disconnected, Refused and Failed."""
        ...


@dataclass(slots=True)
class Counts:
    """Of all streams so far."""

    ended: int = 0
    tokens: int = 0
    turned_away: int = 0  # told to come back, before the first token
    reconnected: int = 0  # a connection broke in the middle; asked again from the beginning
    broken: int = 0  # ended by an error in the middle
    lost: int = 0  # tokens that an answer should have had
    changed: int = 0  # tokens, or their log-probabilities, that are not what they must be

    def since(self, before: "Counts") -> "Counts":
        """What came after."""
        return Counts(
            **{
                item.name: getattr(self, item.name) - getattr(before, item.name)
                for item in fields(self)
            }
        )

    def copy(self) -> "Counts":
        """As it is now."""
        return self.since(Counts())


class Check:
    """Compares one answer, which may begin again, with what it must be."""

    def __init__(self, expected: Answer) -> None:
        self._expected = expected
        self.num_tokens = 0

    def take(self, piece: Piece) -> int:
        """Compare with what is due; how many tokens are others, or have another logprob."""
        end = self.num_tokens + len(piece.token_ids)
        tokens = self._expected.token_ids[self.num_tokens : end]
        logprobs = self._expected.logprobs[self.num_tokens : end]
        right = sum(
            token == wanted and logprob == wanted_logprob
            for token, wanted, logprob, wanted_logprob in zip(
                piece.token_ids, tokens, piece.logprobs, logprobs, strict=False
            )
        )
        self.num_tokens = end
        return len(piece.token_ids) - right

    def again(self) -> None:
        """The same answer comes from its first token on, another time."""
        self.num_tokens = 0

    @property
    def num_lost(self) -> int:
        """Tokens that are not there, at the end."""
        return max(len(self._expected.token_ids) - self.num_tokens, 0)


@dataclass(slots=True)
class Lane:
    """One client that always waits for a token: when the last came, and the longest pause."""

    clock: Callable[[], float]
    begun: bool = False  # in the middle of an answer
    longest_pause: float = 0.0
    _since: float = field(init=False)
    _seen: bool = False

    def __post_init__(self) -> None:
        self._since = self.clock()

    def mark(self) -> None:
        """Measure pauses from now on."""
        self._since, self.longest_pause, self._seen = self.clock(), 0.0, False

    def token(self) -> None:
        """One came."""
        now = self.clock()
        self.longest_pause = max(self.longest_pause, now - self._since)
        self._since, self._seen = now, True

    @property
    def pause_until_now(self) -> float:
        """The longest pause, or the present one if that is longer already."""
        return max(self.longest_pause, self.clock() - self._since)

    @property
    def moved_on(self) -> bool:
        """Whether a token came since the mark."""
        return self._seen


class Streams:
    """So many lanes, each with one question after the other."""

    def __init__(
        self,
        client: Client,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        *,
        num_lanes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._asked = tuple(zip(questions, answers, strict=True))
        self.lanes = tuple(Lane(clock) for _ in range(num_lanes))
        self.counts = Counts()
        self.messages: list[str] = []  # of the first errors
        self._ending = False

    @property
    def num_in_flight(self) -> int:
        """Streams in the middle of their answer."""
        return sum(lane.begun for lane in self.lanes)

    def mark(self) -> None:
        """Measure pauses from now on."""
        for lane in self.lanes:
            lane.mark()

    def end(self) -> None:
        """Begin no more answers, after the first of each lane."""
        self._ending = True

    async def run(self) -> None:
        """Return when all answers have come after `end`."""
        async with asyncio.TaskGroup() as group:
            for number, lane in enumerate(self.lanes):
                group.create_task(self._follow(lane, number))

    async def _follow(self, lane: Lane, number: int) -> None:
        while True:
            question, expected = self._asked[number % len(self._asked)]
            check = Check(expected)
            while not await self._attempt(lane, question, check):
                pass
            if self._ending:
                return
            number += 1

    async def _attempt(self, lane: Lane, question: Question, check: Check) -> bool:
        """Ask; whether that was the end of it, and the question need not be asked again."""
        try:
            async with aclosing(self._client.ask(question)) as pieces:
                async for piece in pieces:
                    self.counts.changed += check.take(piece)
                    self.counts.tokens += len(piece.token_ids)
                    lane.begun = True
                    lane.token()
        except Disconnected as error:
            if lane.begun:
                self.counts.reconnected += 1
                self._note(f"disconnected: {error}")
            else:
                self.counts.turned_away += 1
            check.again()
            return False
        except Refused as error:
            if lane.begun:
                self._broken(error)
                return True
            self.counts.turned_away += 1
            await asyncio.sleep(error.retry_seconds)
            return False
        except Failed as error:
            self._broken(error)
            return True
        else:
            self.counts.ended += 1
            self.counts.lost += check.num_lost
            return True
        finally:
            lane.begun = False

    def _broken(self, error: Exception) -> None:
        self.counts.broken += 1
        self._note(f"broken: {error}")

    def _note(self, message: str) -> None:
        if len(self.messages) < MOST_MESSAGES:
            self.messages.append(message)
