"""How far a simulated engine guesses: the controller's own arithmetic, on chances that are known.

The sequences of a step are told apart by their chance only, to a twentieth, so that one decision
serves all steps of the same kind, on whichever engine.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.control.cost import CostTable
from cluster.control.optimum import admitted, best_rate, price_of_row
from cluster.control.policy import StepShape

LEVELS = 20  # of the chance that a draft position is kept
LATE_LEVELS = 20
MANY = 16  # sequences
WAIT_STEP = 1.25  # waits that differ less count as one
LEAST_WAIT = 1e-4

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Counts = tuple[int, ...]  # sequences by level


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a step is decided by; `late`, and `wait` for each position of a draft, are levels."""

    counts: Counts
    prompt_rows: int
    late: int = 0
    wait: int = 0
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What comes of a situation: tokens a second of one sequence, by level, and of all.

    `seconds` of a step, of which `wait_seconds` for drafts. `depth` is the most drafts of a
    sequence, `drafts` those of all in a step, `accepted` of these are kept.
    """

    rates: tuple[float, ...]
    seconds: float
    wait_seconds: float
    depth: int
    drafts: float
    accepted: float
    price: float
    tokens_per_second: float


class Guesser:
    """Decides, and remembers. `cap` is the most drafts of a sequence; `fixed` always takes it."""

    def __init__(self, cost: CostTable, *, cap: int, mean_context: int, fixed: bool) -> None:
        self._cost = cost
        self._cap = cap
        self._fixed = fixed
        self._mean_context = mean_context
        chances = (np.arange(LEVELS + 1) / LEVELS)[:, None]
        self._survivals = chances ** np.arange(1, cap + 1)  # [levels, positions]
        self._known: dict[Situation, Guess] = {}
        alone, many = (float(cost.seconds(self._shape(number, number))) for number in (1, MANY))
        self.row_seconds = (many - alone) / (MANY - 1)  # about, of a step without drafts
        self.base_seconds = alone - self.row_seconds

    def guess(self, situation: Situation) -> Guess:
        """What is decided there."""
        known = self._known.get(situation)
        if known is None:
            known = self._known[situation] = self._decide(situation)
        return known

    def _shape(self, num_sequences: int, num_rows: int) -> StepShape:
        return StepShape(
            num_sequences=num_sequences,
            num_rows=num_rows,
            num_context_tokens=self._mean_context * num_sequences,
        )

    def _decide(self, situation: Situation) -> Guess:
        counts = np.array(situation.counts)
        levels = np.repeat(np.arange(LEVELS + 1), counts)
        num_decoding = len(levels)
        num_sequences = num_decoding + bool(situation.prompt_rows)
        shape = self._shape(num_sequences, num_decoding + situation.prompt_rows)
        in_time = 1 - situation.late / LATE_LEVELS
        survivals = self._survivals[levels] * in_time
        values = np.where(survivals >= situation.floor, survivals, 0.0)
        costs = self._cost.seconds(shape, np.arange(values.size + 1))
        drafts, price = self._drafts(values, costs, num_decoding, wait_seconds(situation.wait))
        num_drafts = int(drafts.sum())
        waiting = wait_seconds(situation.wait) * int(drafts.max(initial=0))
        seconds = float(costs[num_drafts]) + waiting
        kept = np.where(np.arange(self._cap) < drafts[:, None], survivals, 0.0).sum(axis=1)
        sums = np.bincount(levels, weights=kept, minlength=LEVELS + 1)
        mean_kept = np.divide(sums, counts, out=np.zeros(LEVELS + 1), where=counts > 0)
        rates = np.where(counts > 0, (1 + mean_kept) / seconds, 0.0)
        return Guess(
            rates=tuple(rates.tolist()),
            seconds=seconds,
            wait_seconds=waiting,
            depth=int(drafts.max(initial=0)),
            drafts=num_drafts,
            accepted=float(kept.sum()),
            price=price,
            tokens_per_second=(num_decoding + float(kept.sum())) / seconds,
        )

    def _drafts(
        self, values: FloatArray, costs: FloatArray, plain: int, waiting: float
    ) -> tuple[IntArray, float]:
        """How many drafts of each are verified, and the price of a row."""
        none = np.zeros(len(values), dtype=np.int64)
        if not values.size:
            return none, 0.0
        if self._fixed:
            return np.full(len(values), self._cap), 0.0
        best, drafts, price = plain / float(costs[0]), none, 0.0
        for depth in range(1, self._cap + 1) if waiting else (self._cap,):
            offered = values[:, :depth]
            seconds = costs[: offered.size + 1]
            rate = best_rate(offered.reshape(1, -1), seconds, plain=float(plain))
            price = price or price_of_row(seconds, rate.num_rows, goodput=rate.goodput)
            goodput = rate.when_waiting(waiting * depth)
            if goodput > best:
                best, drafts = goodput, admitted(offered, seconds, goodput=rate.goodput)
        return drafts, price


def level_of(chance: float) -> int:
    """The level of a chance."""
    return round(chance * LEVELS)


def wait_level(seconds: float) -> int:
    """The level of a wait; 0 is none."""
    if seconds < LEAST_WAIT:
        return 0
    return 1 + round(float(np.log(seconds / LEAST_WAIT) / np.log(WAIT_STEP)))


def wait_seconds(level: int) -> float:
    """The wait of a level."""
    return LEAST_WAIT * WAIT_STEP ** (level - 1) if level else 0.0
