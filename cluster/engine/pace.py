"""How fast an engine is: what its steps last and bring, seen from outside of them."""

import math
import time
from collections.abc import Callable

MEMORY_STEPS = 100  # over which what a step costs is forgotten
RECENT_SECONDS = 3.0  # over which a rate is
MEMORY_ANSWERS = 50
LEAST_SPREAD = 0.25  # of the rows' variance, below which a row's own cost cannot be told
STRETCH = 1.6  # times as long prompts may make a step in which others decode
FIRST_ROWS = 8  # of prompts beside those, to see what one costs
GROWTH = 2.0  # times as many rows as were seen lately may be tried


class Rate:
    """Events a second, lately. `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._born = self._counted_at = clock()
        self._count = 0.0

    def add(self, number: float) -> None:
        """So many more, now."""
        self._count = self._faded() + number
        self._counted_at = self._clock()

    @property
    def per_second(self) -> float:
        """The rate; silence makes it fall."""
        age = self._clock() - self._born
        return self._faded() / (RECENT_SECONDS * -math.expm1(-max(age, 0.1) / RECENT_SECONDS))

    def _faded(self) -> float:
        return self._count * math.exp((self._counted_at - self._clock()) / RECENT_SECONDS)


class Line:
    """A line through the rows and seconds of steps; older ones fade."""

    def __init__(self) -> None:
        self.most_rows = 0.0  # of a step, lately
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._product = 0.0

    def observe(self, num_rows: float, seconds: float) -> None:
        """A step of so many rows took so long."""
        keep = 1 - 1 / MEMORY_STEPS
        self.most_rows = max(keep * self.most_rows, num_rows)
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + num_rows
        self._seconds = keep * self._seconds + seconds
        self._rows_squared = keep * self._rows_squared + num_rows**2
        self._product = keep * self._product + num_rows * seconds

    @property
    def knows_rows(self) -> bool:
        """Whether steps were of different rows, so that it shows what one costs."""
        return self._weight > 0 and self._spread >= LEAST_SPREAD * self._weight

    @property
    def row_seconds(self) -> float:
        """What one more row adds to a step; 0 while steps were all alike."""
        if not self.knows_rows:
            return 0.0
        slope = (self._product - self._rows * self._seconds / self._weight) / self._spread
        return min(max(slope, 0.0), self._seconds / self._rows)

    @property
    def base_seconds(self) -> float:
        """What a step takes beyond its rows."""
        if not self._weight:
            return 0.0
        return max((self._seconds - self._rows * self.row_seconds) / self._weight, 0.0)

    @property
    def _spread(self) -> float:
        return self._rows_squared - self._rows**2 / self._weight


class Pace:
    """What steps cost, and the rates of what they brought.

    Those in which something decodes have a line of their own, too: in the large steps of prompts
    alone a row is cheaper.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = Rate(clock)
        self.drafted = Rate(clock)
        self.accepted = Rate(clock)
        self.step_seconds = 0.0
        self.tokens_per_step = 0.0
        self.answer_tokens = 0.0
        self._all = Line()
        self._decoding = Line()

    def observe_step(self, *, num_rows: float, seconds: float, decodes: bool = True) -> None:
        """A step of so many rows, drafts included, took so long; `decodes` if something did."""
        self._all.observe(num_rows, seconds)
        if decodes:
            self._decoding.observe(num_rows, seconds)
        self.step_seconds = _towards(self.step_seconds, seconds, 0.1)

    def observe_tokens(
        self, *, num_sequences: int, num_tokens: int, num_drafted: int, num_accepted: int
    ) -> None:
        """A step brought so many sequences tokens."""
        self.tokens.add(num_tokens)
        self.drafted.add(num_drafted)
        self.accepted.add(num_accepted)
        if num_sequences:
            self.tokens_per_step = _towards(self.tokens_per_step, num_tokens / num_sequences, 0.05)

    def observe_answer(self, num_tokens: int) -> None:
        """An answer ended by itself."""
        self.answer_tokens = _towards(self.answer_tokens, num_tokens, 1 / MEMORY_ANSWERS)

    @property
    def row_seconds(self) -> float:
        """What one more row adds to a step; 0 while steps were all alike."""
        return self._all.row_seconds

    @property
    def base_seconds(self) -> float:
        """What a step takes beyond its rows."""
        return self._all.base_seconds

    def more_rows(self, num_rows: int) -> int:
        """How many rows beside so many make a step STRETCH times as long, as far as it is known.

        What was never tried is approached: what lies beyond it may cost more.
        """
        line = self._decoding
        if not line.knows_rows:
            return FIRST_ROWS
        row_seconds = line.row_seconds
        more_seconds = (STRETCH - 1) * (line.base_seconds + num_rows * row_seconds)
        most = GROWTH * max(line.most_rows, FIRST_ROWS)
        return max(int(min(most, more_seconds / row_seconds) if row_seconds else most), 1)


def _towards(mean: float, value: float, rate: float) -> float:
    """A running mean, which begins with the first value."""
    return value if not mean else mean + rate * (value - mean)
