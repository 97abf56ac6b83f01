"""Requests with speculation beside requests without: how they compare, and whether to go on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cluster.tools.choosing.resampling import Interval, ratio_interval, share_interval

TOLERANCE = 0.05  # of the time between tokens: what may be lost unseen


class Decision(StrEnum):
    """What to do with speculation."""

    PROMOTE = "promote"
    RETURN = "return"
    UNDECIDED = "undecided"  # too few requests to tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as its client saw it. One that failed says why, and has no answer."""

    prompt: int
    token_ids: tuple[int, ...] = ()
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Stage:
    """A share of the requests speculated, the others in the same time did not.

    `reference` are the answers of every prompt without speculation. With `must_be_same` the server
    promises that they do not depend on drafts.
    """

    share: float
    canary: Sequence[Served]
    control: Sequence[Served]
    reference: Mapping[int, tuple[int, ...]]
    must_be_same: bool
    tolerance: float = TOLERANCE

    @cached_property
    def token_time(self) -> Interval | None:
        """Time between tokens with speculation to that without: under 1 is faster."""
        return ratio_interval(_between(self.canary), _between(self.control))

    @cached_property
    def first_token(self) -> Interval | None:
        """The same of the time to the first token."""
        groups = (
            [(each.first_token_seconds, 1.0) for each in _answered(group)]
            for group in (self.canary, self.control)
        )
        return ratio_interval(*groups)

    @cached_property
    def throughput(self) -> Interval | None:
        """Tokens a second of a stream with speculation to those without: over 1 is faster."""
        groups = (
            [(float(len(each.token_ids)), each.seconds) for each in _answered(group)]
            for group in (self.canary, self.control)
        )
        return ratio_interval(*groups)

    @cached_property
    def divergence(self) -> Interval:
        """The share of answers with speculation that are not the reference."""
        return self._divergence(self.canary)

    @cached_property
    def own_divergence(self) -> Interval:
        """The same of answers without speculation: the target's own restlessness."""
        return self._divergence(self.control)

    @cached_property
    def failures(self) -> tuple[Interval, Interval]:
        """Shares of requests that failed, with speculation and without."""
        with_it, without = (
            share_interval(sum(each.error is not None for each in group), len(group))
            for group in (self.canary, self.control)
        )
        return with_it, without

    @property
    def acceptance_rate(self) -> float | None:
        """Of the drafts in it."""
        num_drafted = sum(each.num_drafted for each in self.canary)
        num_accepted = sum(each.num_accepted for each in self.canary)
        return num_accepted / num_drafted if num_drafted else None

    @cached_property
    def decision(self) -> Decision:
        """Return for what was shown to be worse, promote what was shown not to be."""
        if any(self.objections()):
            return Decision.RETURN
        time = self.token_time
        if time is None or time.high > 1 + self.tolerance:
            return Decision.UNDECIDED
        return Decision.PROMOTE

    def objections(self) -> Iterator[str]:
        """All that was shown to be worse."""
        failed, own_failed = self.failures
        if failed.value > own_failed.value and (
            own_failed.value == 0 or failed.low > own_failed.high
        ):
            yield f"{failed.value:.0%} of the requests failed, {own_failed.value:.0%} without"
        diverged, own = self.divergence, self.own_divergence
        if diverged.value > 0 and (self.must_be_same or diverged.low > own.high):
            yield f"{diverged.value:.0%} of the answers are not those without speculation"
        time, first = self.token_time, self.first_token
        if time is not None and time.low > 1:
            yield f"time between tokens is {time} of that without"
        if first is not None and first.low > 1 + self.tolerance:
            yield f"the first token takes {first} of what it takes without"

    def _divergence(self, group: Sequence[Served]) -> Interval:
        known = [each for each in _answered(group) if each.prompt in self.reference]
        diverged = sum(each.token_ids != self.reference[each.prompt] for each in known)
        return share_interval(diverged, len(known))


def decide(stages: Sequence[Stage]) -> Decision:
    """Over all stages: any that returns does, and the last one has to have promoted."""
    if any(stage.decision is Decision.RETURN for stage in stages):
        return Decision.RETURN
    return stages[-1].decision if stages else Decision.UNDECIDED


def _answered(group: Sequence[Served]) -> list[Served]:
    return [each for each in group if each.error is None and each.token_ids]


def _between(group: Sequence[Served]) -> list[tuple[float, float]]:
    """Seconds and tokens after the first token of each request."""
    return [
        (each.seconds - each.first_token_seconds, float(len(each.token_ids) - 1))
        for each in _answered(group)
        if len(each.token_ids) > 1
    ]
