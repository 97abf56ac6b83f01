"""What is asked of the targets, and what they can give: both measured, in tokens a second."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cluster.messages import EngineLoad

FALLING = 0.9  # of the drafts half a window earlier: fewer, and guessing is on its way down
SATURATED_SECONDS = 8.0  # time constant of the capacity that is seen when requests wait
RETURN_SECONDS = 600.0  # and of going back to what the engine says of itself
LEAST_CAPACITY = 0.25  # of what the engine says of itself, which may be with many drafts
UNKNOWN_ANSWER_TOKENS = 128.0
NEARLY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLoad:
    """What a target replica says of itself.

    `waiting_tokens` is the work of its queue. `capacity` is what it gives at most, in tokens a
    second: its slots full and as many drafts as pay then. `depth` is the drafts it verifies in a
    step, by sequence.
    """

    tokens_per_second: float
    waiting_tokens: float
    capacity: float
    depth: float = 0.0

    @classmethod
    def of(cls, load: EngineLoad) -> Self:
        """What of an engine's load counts here."""
        waiting_tokens = load.waiting * (load.answer_tokens or UNKNOWN_ANSWER_TOKENS)
        own_tokens = load.tokens_per_second - load.accepted_per_second  # one a sequence and step
        return cls(
            tokens_per_second=load.tokens_per_second,
            waiting_tokens=waiting_tokens,
            capacity=load.capacity,
            depth=load.drafted_per_second / own_tokens if own_tokens > 0 else 0.0,
        )


@dataclass(frozen=True, slots=True)
class _Moment:
    """Of all replicas together; `depth` is the mean."""

    now: float
    rate: float
    backlog: float
    depth: float


class DemandWindow:
    """What was seen in the last seconds, twice: the latter half says how things are now."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._moments: deque[_Moment] = deque()

    def add(self, now: float, *, rate: float, backlog: float, depth: float) -> None:
        """One more moment."""
        self._moments.append(_Moment(now, rate, backlog, depth))
        while now - self._moments[0].now > 2 * self._seconds:
            self._moments.popleft()

    @property
    def demand(self) -> float:
        """Tokens a second that come in: those given, and those that came to wait."""
        return self._demand_of(self._latter())

    @property
    def slope(self) -> float:
        """How much demand grows in a second, if it has done so all the time; 0 if that is unclear.

        After a jump the latter half is level: there is nothing to anticipate.
        """
        return min(self._growth(self._former(), self._latter()), self._growth(*self._halves()))

    @property
    def depth(self) -> float:
        """Drafts of a sequence in a step, now."""
        return mean([each.depth for each in self._halves()[1]])

    @property
    def backlog_falls(self) -> bool:
        """Whether less waits than a window ago: then all is well, in a while."""
        return self._moments[-1].backlog < self._latter()[0].backlog

    @property
    def depth_falls(self) -> bool:
        """Whether there were clearly more a moment ago."""
        return self.depth < FALLING * mean([each.depth for each in self._halves()[0]])

    def _latter(self) -> list[_Moment]:
        now = self._moments[-1].now
        return [each for each in self._moments if now - each.now <= self._seconds]

    def _halves(self) -> tuple[list[_Moment], list[_Moment]]:
        """Of the latter, both with at least one."""
        latter = self._latter()
        middle = (latter[0].now + latter[-1].now) / 2
        return (
            [each for each in latter if each.now <= middle],
            [each for each in latter if each.now >= middle],
        )

    def _former(self) -> list[_Moment]:
        now = self._moments[-1].now
        return [each for each in self._moments if now - each.now >= self._seconds]

    def _growth(self, former: Sequence[_Moment], latter: Sequence[_Moment]) -> float:
        """By how much demand rose in a second from one part to the other."""
        if len(former) < 2 or len(latter) < 2:  # noqa: PLR2004 - no rate without two moments
            return 0.0
        seconds = (latter[-1].now + latter[0].now - former[-1].now - former[0].now) / 2
        difference = self._demand_of(latter) - self._demand_of(former)
        return difference / max(seconds, NEARLY)

    @staticmethod
    def _demand_of(moments: Sequence[_Moment]) -> float:
        seconds = moments[-1].now - moments[0].now
        rate = mean([each.rate for each in moments])
        if seconds <= 0:
            return rate
        return max(rate + (moments[-1].backlog - moments[0].backlog) / seconds, 0.0)


class MeasuredCapacity:
    """Tokens a second of one target: what it says, corrected by what is seen when it has all."""

    def __init__(self) -> None:
        self._ratio = 1.0  # of what is seen to what they say
        self._said = 0.0
        self._seen_at: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one replica at most."""
        return self._said * self._ratio

    def observe(self, loads: Sequence[TargetLoad], *, now: float) -> None:
        """Look at those that have more to do than they can."""
        self._said = mean([load.capacity for load in loads])
        seconds = 0.0 if self._seen_at is None else now - self._seen_at
        self._seen_at = now
        full = [load for load in loads if load.waiting_tokens > 0 and load.capacity > 0]
        seen, constant = 1.0, RETURN_SECONDS
        if full:
            seen = mean([load.tokens_per_second / load.capacity for load in full])
            constant = SATURATED_SECONDS
        self._ratio += (1 - math.exp(-seconds / constant)) * (seen - self._ratio)
        self._ratio = max(self._ratio, LEAST_CAPACITY)


class Smooth:
    """A number that follows what is seen within some seconds, beginning with the first."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at: float | None = None

    def follow(self, value: float, *, now: float, seconds: float) -> float:
        """What it is after this was seen; `seconds` is the time constant."""
        part = 1.0 if self._at is None else 1 - math.exp(-(now - self._at) / seconds)
        self._at = now
        self._value += part * (value - self._value)
        return self._value


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)
