"""How many rows pay: the arithmetic of section "how far to guess", over arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.control.kernels import take_best

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Rate:
    """Steps as they should be: mean (weighted) tokens, seconds and draft rows of one."""

    tokens: float
    seconds: float
    num_rows: float

    @property
    def goodput(self) -> float:
        """Weighted tokens a second."""
        return self.tokens / self.seconds

    def when_waiting(self, seconds: float) -> float:
        """The goodput when every step also waits so long."""
        return self.tokens / (self.seconds + seconds)


def best_rate(offers: NDArray[np.floating[Any]], costs: FloatArray, *, plain: float) -> Rate:
    """The steps of best goodput when they offer, in turn, one of the rows `[scenarios, drafts]`.

    `costs[b]` are the seconds of a step with b drafts, `plain` its tokens without any. Each
    scenario takes its best positions as long as they are worth their time at the common rate
    (Dinkelbach's method).
    """
    falling = np.sort(offers, axis=1)[:, ::-1]
    tokens = np.zeros((len(offers), offers.shape[1] + 1))
    np.cumsum(falling, axis=1, out=tokens[:, 1:])
    part = 1 / len(offers)
    rate = Rate(plain, float(costs[0]), 0.0)
    for _ in range(ROUNDS):
        counts = (tokens - rate.goodput * costs).argmax(axis=1).tolist()
        rate = Rate(
            plain + part * sum(float(tokens[at, count]) for at, count in enumerate(counts)),
            part * sum(float(costs[count]) for count in counts),
            part * sum(counts),
        )
    return rate


def admitted(values: FloatArray, costs: FloatArray, *, goodput: float) -> IntArray:
    """How many first positions of each draft to verify, of `values[drafts, positions]`.

    Values are survivals times weights and never rise along a draft, so that the best of all are a
    prefix of each. Taken are the first B, where B is best: sum of values - goodput * costs[B].
    """
    values, counts = np.ascontiguousarray(values), np.empty(len(values), dtype=np.int64)
    take_best(values, np.sort(values, axis=None), costs, goodput, counts)
    return counts


def price_of_row(costs: FloatArray, num_rows: float, *, goodput: float) -> float:
    """Goodput times what a row costs, on average from half to one and a half of those taken.

    Not just the next: it may be the first of a tile, which costs as much as all others in it.
    """
    last = min(round(1.5 * num_rows) + 4, len(costs) - 1)
    first = min(int(num_rows / 2), last - 1)
    if last <= 0:
        return 0.0
    return float(goodput * (costs[last] - costs[first]) / (last - first))
