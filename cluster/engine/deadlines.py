"""How much time requests have left: whose is over, and whose tokens are urgent."""

import math
import time
from collections.abc import Callable, Iterable

from cluster.engine.sequence import Sequence

MEMORY_STEPS = 10  # over which what a step takes is averaged
MOST_URGENCY = 4.0
MOST_NEEDED = 16.0  # tokens a step, beyond which the deadline is out of reach


class Deadlines:
    """Measures with `clock`, in seconds that never go back."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step_seconds: float | None = None

    def observe(self, step_seconds: float) -> None:
        """A step took so long."""
        if self._step_seconds is None:
            self._step_seconds = step_seconds
        self._step_seconds += (step_seconds - self._step_seconds) / MEMORY_STEPS

    def expired(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those whose deadline has passed."""
        now = self._clock()
        return [
            sequence
            for sequence in sequences
            if sequence.deadline_at is not None and sequence.deadline_at <= now
        ]

    def urgency(self, sequence: Sequence) -> float:
        """What a token of the sequence is worth, next to one of a sequence that has time.

        The tokens it needs in each step to bring all it may in time, as 1, 2 or 4. 1 as well
        where nobody knows how many it may bring, or where no draft would save it.
        """
        max_tokens = sequence.request.stopping.max_tokens
        if sequence.deadline_at is None or max_tokens is None or not self._step_seconds:
            return 1.0
        num_steps = (sequence.deadline_at - self._clock()) / self._step_seconds
        needed = sequence.max_tokens_left / num_steps if num_steps > 0 else math.inf
        if not 1 < needed <= MOST_NEEDED:
            return 1.0
        return min(2.0 ** math.ceil(math.log2(needed)), MOST_URGENCY)
