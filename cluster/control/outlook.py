"""What drafting should bring to a step, before any draft is there."""

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.control.cost import CostTable
from cluster.control.draft_cost import DraftCost
from cluster.control.long_run import LongRun
from cluster.control.optimum import best_rate, price_of_row
from cluster.control.policy import Candidate, StepShape
from cluster.control.prospects import NUM_KEPT, NUM_SCENARIOS, Prospects
from cluster.control.regime import Reason

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

REACHED = 0.4  # of rows that are verified to learn from them; what is not reached teaches nothing
LEAST_WORTH = 0.005  # tokens a draft; what brings less is not asked, however cheap
MATTERS = 0.02  # of a step's tokens: what drafts would bring but for their own time
FREE = 0.005  # of a step's tokens: drafts that cost less in all are asked for in full
LOOK_STEPS = 4  # of the same sequences, in which what to expect of them hardly changes
WEIGHT_BASE = 2**0.5  # of one level of priority
MOST_LEVELS = 4
OWN = attrgetter("seq_id", "max_drafts", "priority", "urgency")  # an outlook is of the same ones


class Outlook:
    """A step's candidates, weighed against what their last drafts were worth.

    `goodput`        weighted tokens a second to be expected in the long run, as steps are now
    `price`          the survival below which a row does not pay
    `worth`          by candidate: tokens that drafts of it bring beyond the time of their rows
    `pays`           by candidate: whether that is more than asking for it costs
    `all_pay`        whether all do
    `wanted`         by candidate: how many positions to ask for
    `gain`           what asking all that pay brings, net of all waiting, as a part of the step
    `step_seconds`   of the step without drafts
    `row_seconds`    of one more draft row
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        shape: StepShape,
        *,
        drafts: NDArray[np.float32],
        cost: CostTable,
        draft_cost: DraftCost,
        long_run: LongRun,
        step: int,
        trims: bool,
    ) -> None:
        """`drafts` are survivals of the last drafts `[NUM_KEPT, candidates, positions]`."""
        self._cost = cost
        self._shape = shape
        num_positions = drafts.shape[2]
        self.caps, self.weights, drafts = _weighed(candidates, drafts)
        self._drafts = drafts
        count = len(candidates)
        plain = float(self.weights.sum()) + shape.num_sequences - count
        self._plain = plain
        costs = cost.rising(shape, count * num_positions)
        self.step_seconds = float(costs[0])
        scenarios = (step + np.arange(NUM_SCENARIOS) * (NUM_KEPT // NUM_SCENARIOS)) % NUM_KEPT
        offers = drafts[scenarios].reshape(NUM_SCENARIOS, -1)
        rate = best_rate(offers, costs, plain=plain)
        expected = rate.goodput * self.step_seconds / plain
        speedup = long_run.speedup(shape.num_sequences, expected=expected)
        self.goodput = speedup * plain / self.step_seconds
        self.price = price_of_row(costs, rate.num_rows, goodput=self.goodput)
        self._worth_positions(trims=trims)
        self._price_drafts(self.goodput, plain, draft_cost, trims=trims)
        waiting = draft_cost.seconds(int(self.pays.sum()), int(self.wanted[self.pays].sum()))
        worth = float(self.worth[self.pays].sum())
        rate_gain = rate.when_waiting(waiting) * self.step_seconds / plain - 1
        self.gain = max((worth - waiting * self.goodput) / plain, rate_gain)
        self.gain = self.gain if self.pays.any() else 0.0
        self.row_seconds = self.price / self.goodput
        self._costs, self._num_rows = costs, round(rate.num_rows)

    def seconds_of(self, num_rows: int) -> float:
        """Of so many draft rows beyond those that pay."""
        first, last = self._num_rows, len(self._costs) - 1
        return float(self._costs[min(first + num_rows, last)] - self._costs[first])

    def depth_that_teaches(self, where: BoolArray) -> int:
        """How far the drafts of these candidates are likely to be reached; at least 1."""
        most = int(self.caps[where].max())
        survivals = self._drafts[:, where].mean(axis=(0, 1))
        return min(1 + int((survivals >= REACHED).sum()), most)

    def blocked_by(self) -> Reason:
        """Why drafting does not pay, if it does not."""
        if float(self.worth.sum()) > MATTERS * self._plain:
            return Reason.DRAFT_TIME
        alone = StepShape(
            num_sequences=1,
            num_rows=1,
            num_context_tokens=self._shape.num_context_tokens // self._shape.num_sequences,
        )
        num_positions = self._drafts.shape[2]
        costs = self._cost.rising(alone, num_positions)
        price = price_of_row(costs, num_positions / 2, goodput=1 / float(costs[0]))
        worth = np.maximum(self._drafts - price, 0.0).mean(axis=0).sum(axis=1)
        return Reason.LOAD if (worth > MATTERS).any() else Reason.ACCEPTANCE

    def _worth_positions(self, *, trims: bool) -> None:
        """What each position is worth beyond its row; one that can be cut is worth no less than 0.

        A draft that cannot be cut is as good as the average of its kind.
        """
        if trims:
            surplus = self._drafts - np.float32(self.price)
            self._positions = np.maximum(surplus, np.float32(0), out=surplus).mean(axis=0)
        else:
            self._positions = np.maximum(self._drafts.mean(axis=0) - np.float32(self.price), 0.0)
        self.worth = self._positions.sum(axis=1, dtype=np.float64)

    def _price_drafts(
        self, goodput: float, plain: float, draft_cost: DraftCost, *, trims: bool
    ) -> None:
        """How many positions each candidate is asked for, and whether it is asked at all."""
        token_price = goodput * draft_cost.per_token(len(self.caps))
        net = self.worth
        if trims and token_price * float(self.caps.sum()) < FREE * plain:
            self.wanted = self.caps
        else:
            worthwhile = self._positions > token_price
            slack = int(trims)  # one more, which may turn out well
            self.wanted = np.minimum(worthwhile.sum(axis=1) + slack, self.caps)
            net = np.where(worthwhile, self._positions - token_price, 0.0).sum(axis=1)
        least = np.maximum(goodput * draft_cost.per_sequence, LEAST_WORTH * self.weights)
        self.pays = (net > least) & (self.wanted > 0)
        self.all_pay = bool(self.pays.all())


class Lookout:
    """Makes outlooks; one holds for some steps of the same sequences."""

    def __init__(
        self,
        prospects: Prospects,
        *,
        cost: CostTable,
        draft_cost: DraftCost,
        long_run: LongRun,
        trims: bool,
    ) -> None:
        self._prospects = prospects
        self._cost = cost
        self._draft_cost = draft_cost
        self._long_run = long_run
        self._trims = trims
        self._outlook: Outlook | None = None
        self._until = 0
        self._whose: tuple[int, list[Any]] = (0, [])

    def forget(self) -> None:
        """Something has changed."""
        self._outlook = None

    def outlook(
        self, candidates: Sequence[Candidate], shape: StepShape, *, rows: IntArray, step: int
    ) -> Outlook:
        """Of these candidates, whose prospects are in `rows`."""
        whose = (shape.num_sequences, list(map(OWN, candidates)))
        if self._outlook is None or step >= self._until or self._whose != whose:
            self._outlook = Outlook(
                candidates,
                shape,
                drafts=self._prospects.drafts(rows),
                cost=self._cost,
                draft_cost=self._draft_cost,
                long_run=self._long_run,
                step=step,
                trims=self._trims,
            )
            self._whose, self._until = whose, step + LOOK_STEPS
        return self._outlook


@cache
def weight_of(priority: int) -> float:
    """What a token of a request is worth, next to one of a request of priority 0."""
    return float(WEIGHT_BASE ** max(-MOST_LEVELS, min(MOST_LEVELS, priority)))


def _weighed(
    candidates: Sequence[Candidate], drafts: NDArray[np.float32]
) -> tuple[IntArray, FloatArray, NDArray[np.float32]]:
    """Caps, weights, and drafts that respect both."""
    _, count, num_positions = drafts.shape
    caps = np.full(count, num_positions)
    weights = np.ones(count)
    own = [each.max_drafts for each in candidates]
    if own.count(None) < count:
        caps = np.clip([num_positions if cap is None else cap for cap in own], 0, num_positions)
        drafts = drafts * (np.arange(num_positions) < caps[:, None])
    own_weights = [weight_of(each.priority) * each.urgency for each in candidates]
    if own_weights.count(1.0) < count:
        weights = np.array(own_weights)
        drafts = drafts * weights[:, None].astype(np.float32)
    return caps, weights, drafts
