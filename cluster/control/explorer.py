"""What may be spent on finding out, and on what."""

import numpy as np
from numpy.typing import NDArray

from cluster.control.draft_cost import DraftCost
from cluster.control.outlook import Outlook

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

INCOME = 0.005  # of the time of steps,
LEAST_INCOME = 0.001  # and where nothing that was only tried has been kept for long
FEW = 4  # sequences; of more there is more to learn from anyway: the income falls with their root
BARREN = 0.9  # what is left of the income when what was tried is not kept
FIRST_STEPS = 6.0
MOST_STEPS = 6.0
RICH = 0.5  # of the most that is saved
SHARE = 0.25  # of the credit that goes into one step's depth
LEAST_SECONDS = 1e-9


class Explorer:
    """Spends a credit of seconds: at most half a hundredth of the time, and a little to begin with.

    It is counted in expectation: what exploring costs beyond what it is thought to bring.
    """

    def __init__(self) -> None:
        self._credit: float | None = None
        self._income = INCOME
        self._most = 0.0

    @property
    def credit(self) -> float:
        """Seconds that are left; 0 before the first step."""
        return self._credit or 0.0

    @property
    def is_rich(self) -> bool:
        """Whether what was put off can be tried already.

        More was saved than is being spent, and not for the reason that nothing is ever kept.
        """
        return self.credit > RICH * self._most and self._income > LEAST_INCOME

    def earn(self, step_seconds: float, num_sequences: int) -> None:
        """A step of that expected length begins, in which so many may be drafted for."""
        if self._credit is None:
            self._credit = FIRST_STEPS * step_seconds
        self._most = MOST_STEPS * step_seconds
        if self._credit < self._most:
            income = self._income * min(FEW / num_sequences, 1.0) ** 0.5
            self._credit = min(self._credit + income * step_seconds, self._most)

    def spend(self, seconds: float) -> None:
        """Explored at that price, which may leave a debt."""
        self._credit = self.credit - max(seconds, 0.0)

    def learn(self, *, kept: bool) -> None:
        """Whether a token was kept of those that were only tried in a step."""
        self._income = INCOME if kept else max(BARREN * self._income, LEAST_INCOME)

    def looks(
        self, outlook: Outlook, draft_cost: DraftCost, asked: BoolArray, due: BoolArray
    ) -> BoolArray:
        """Whom of those due to draft for, only to see what their drafts look like now."""
        fixed = 0.0 if asked.any() else draft_cost.fixed
        each = draft_cost.per_sequence + draft_cost.per_token(len(due)) * outlook.caps
        price = fixed + np.cumsum(np.where(due, each, 0.0))
        chosen = due & (outlook.caps > 0) & (price <= self.credit)
        if chosen.any():
            self.spend(float(price[chosen].max()))
        return chosen

    def probes(self, outlook: Outlook, looks: BoolArray) -> tuple[BoolArray, int]:
        """Whose drafts, of those looked at, to verify whatever they look like, and how far."""
        chosen = np.zeros_like(looks)
        if self.credit <= 0 or not looks.any():
            return chosen, 0
        most = outlook.depth_that_teaches(looks)
        each = max(outlook.row_seconds, LEAST_SECONDS)
        depth = int(np.clip(SHARE * self.credit / each, 1, most))
        tried = np.flatnonzero(looks)[: int(self.credit / (depth * each))]
        price = max(depth * each * len(tried), outlook.seconds_of(depth * len(tried)))
        if price > self.credit or not len(tried):
            return chosen, 0
        self.spend(price)
        chosen[tried] = True
        return chosen, depth

    def whole(
        self,
        turn: BoolArray,
        values: FloatArray,
        counts: IntArray,
        lengths: IntArray,
        costs: FloatArray,
        *,
        goodput: float,
    ) -> BoolArray:
        """Whose drafts, of those whose turn it is, to verify to their end.

        `counts` of the positions of `values` are taken anyway, and of these steps' `costs` the
        first is that of none.
        """
        wanted = np.flatnonzero(turn)
        num_taken = int(counts.sum())
        positions = np.arange(values.shape[1])
        brought = np.where(positions >= counts[wanted, None], values[wanted], 0.0).sum(axis=1)
        rows = np.minimum(num_taken + np.cumsum((lengths - counts)[wanted]), len(costs) - 1)
        losses = costs[rows] - costs[num_taken] - np.cumsum(brought) / goodput
        affordable = int((np.maximum.accumulate(losses) <= SHARE * self.credit).sum())
        chosen = np.zeros_like(turn)
        if affordable:
            self.spend(float(losses[affordable - 1]))
            chosen[wanted[:affordable]] = True
        return chosen
