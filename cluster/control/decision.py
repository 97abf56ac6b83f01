"""Why a step verified what it verified."""

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

NUM_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One step's decision: `survivals` `[sequences, positions]` were offered, `admitted` taken.

    `goodput` is in (weighted) tokens a second, `price` the survival a row must have. `reason` says
    why; sequences in `explored` were taken whole to learn from them.
    """

    step: int
    drafting: bool
    reason: str
    price: float
    goodput: float
    draft_seconds: float
    seq_ids: tuple[int, ...]
    survivals: NDArray[np.float64]
    admitted: NDArray[np.int64]
    explored: tuple[int, ...] = ()

    def __str__(self) -> str:
        """One line a sequence: what is before the bar was verified."""
        what = f"step {self.step}: {self.reason}; price {self.price:.3f}"
        rates = f"{self.goodput:.1f} tokens/s, {self.draft_seconds * 1e3:.1f} ms of drafting"
        lines = [f"{what}, {rates}"]
        for seq_id, survivals, count in zip(
            self.seq_ids, self.survivals, self.admitted, strict=True
        ):
            offered = [f"{survival:.2f}" for survival in survivals if survival > 0]
            offered.insert(int(count), "|")
            note = " (to learn)" if seq_id in self.explored else ""
            lines.append(f"  {seq_id}: {' '.join(offered)}{note}")
        return "\n".join(lines)


class DecisionLog:
    """The last decisions; all of them go to the log at the level of debugging."""

    def __init__(self) -> None:
        self._last: deque[Decision] = deque(maxlen=NUM_KEPT)

    @property
    def last(self) -> tuple[Decision, ...]:
        """Oldest first."""
        return tuple(self._last)

    def keep(self, decision: Decision) -> None:
        """Add one, and forget the oldest if there are too many."""
        self._last.append(decision)
        logger.debug("%s", decision)
