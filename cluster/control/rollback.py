"""When new draft weights are worse than the old ones: a test on what the target thought of both."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

CERTAINTY = 3.5  # standard deviations: the question is asked again and again
LEAST_VERIFIED = 300  # positions of each, before which nothing is decided
SETTLED = 5000  # positions of the new one, after which it stays
ALIKE = 2.0  # positions of one text say less than as many of different ones
TOLERATED = 0.02  # of acceptance: to be worse by less is worth no change


class Verdict(StrEnum):
    """What to do with new weights."""

    WAIT = "wait"
    KEEP = "keep"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Draft positions that the target decided on, and how many it kept."""

    num_verified: int = 0
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        """The part that was kept; 0 of nothing."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """All together."""
    parts = tuple(parts)
    return Acceptance(
        sum(part.num_verified for part in parts), sum(part.num_accepted for part in parts)
    )


def judge(old: Acceptance, new: Acceptance) -> Verdict:
    """Whether new weights stay: until they are surely worse they do.

    Worse is by more than TOLERATED at the lower end of an interval for the difference of the two
    rates: Newcombe's, of Wilson's for each (Statistics in Medicine 17, 1998, method 10). Where too
    little is known of the old ones there is nothing to be worse than.
    """
    if new.num_verified < LEAST_VERIFIED:
        return Verdict.WAIT
    if old.num_verified >= LEAST_VERIFIED and lost_at_least(old, new) > TOLERATED:
        return Verdict.RETURN
    return Verdict.KEEP if new.num_verified >= SETTLED else Verdict.WAIT


def lost_at_least(old: Acceptance, new: Acceptance) -> float:
    """The lower end of the interval for the old rate less the new; both must have seen something.

    Negative where the new one may be better.
    """
    old_low, _ = _wilson(old)
    _, new_high = _wilson(new)
    return old.rate - new.rate - sqrt((old.rate - old_low) ** 2 + (new_high - new.rate) ** 2)


def _wilson(seen: Acceptance) -> tuple[float, float]:
    """Wilson's score interval for a rate."""
    number = seen.num_verified / ALIKE
    spread = CERTAINTY**2 / number
    middle = (seen.rate + spread / 2) / (1 + spread)
    half = sqrt(spread * (seen.rate * (1 - seen.rate) + spread / 4)) / (1 + spread)
    return middle - half, middle + half
