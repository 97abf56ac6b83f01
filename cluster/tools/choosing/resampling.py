"""How sure a comparison is: intervals around ratios and shares, from the requests there were."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000

Parts = Sequence[tuple[float, float]]  # (above, below) of each request


@dataclass(frozen=True, slots=True)
class Interval:
    """What was found, and between what it lies with CONFIDENCE."""

    low: float
    value: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_interval(own: Parts, others: Parts, *, seed: int = 0) -> Interval | None:
    """The ratio of two groups' rates, each a sum over a sum, by resampling requests (bootstrap).

    Requests are drawn anew from each group, with those that are alike in length kept together in
    no way: long ones count by what they are. None where a rate is nothing or of nothing.
    """
    groups = [np.array(group, dtype=np.float64).reshape(-1, 2) for group in (own, others)]
    sums = [group.sum(axis=0) for group in groups]
    if not all((part > 0).all() for part in sums):
        return None
    chances = np.random.default_rng(seed)
    rates = list(starmap(_resampled, ((group, chances) for group in groups)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = rates[0] / rates[1]
    tail = 100 * (1 - CONFIDENCE) / 2
    usable = ratios[np.isfinite(ratios)]
    low, high = np.percentile(usable, [tail, 100 - tail])
    value = (sums[0][0] / sums[0][1]) / (sums[1][0] / sums[1][1])
    return Interval(min(float(low), float(value)), float(value), max(float(high), float(value)))


def _resampled(group: NDArray[np.float64], chances: np.random.Generator) -> NDArray[np.float64]:
    """The rate of as many requests as there are, drawn RESAMPLES times."""
    drawn = chances.integers(0, len(group), size=(RESAMPLES, len(group)))
    above, below = (group[:, column][drawn].sum(axis=1) for column in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(above / below)


def share_interval(count: int, total: int) -> Interval:
    """A share of so many, by Wilson's score, which holds for none and for all of them, too."""
    if not total:
        return Interval(0.0, 0.0, 1.0)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = count / total
    scale = 1 + z**2 / total
    centre = (share + z**2 / (2 * total)) / scale
    reach = z / scale * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return Interval(
        min(max(centre - reach, 0.0), share), share, max(min(centre + reach, 1.0), share)
    )
