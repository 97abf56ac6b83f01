"""How likely the target is to keep a drafted token, learned from what it went on to say.

Every committed token grades the tail that was drafted for its place, whether that was sent, sent
late or never sent: right up to the first place where the two part, and unknown after it.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # of the margin, in logits
MEMORY = 512.0  # graded tokens after which an old one counts for little
TRUST = 8.0  # graded tokens that weigh as much as what is believed before
FIRST_GUESS = 0.8


class Survival:
    """Estimates by margin, each drawn towards the mean of all while it has seen little.

    A token's margin is known before it is drawn, so what is estimated of a tail's place depends on
    the tokens before it and not on which one stands there.
    """

    def __init__(self) -> None:
        self._kept = [0.0] * (len(EDGES) + 1)
        self._graded = [0.0] * (len(EDGES) + 1)

    def observe(self, margins: Sequence[float], num_right: int, num_known: int) -> None:
        """The first `num_right` of `num_known` tokens were right, and the one after them not."""
        fading = 1 - 1 / MEMORY
        for place, margin in enumerate(margins[: min(num_right + 1, num_known)]):
            bucket = bisect_right(EDGES, margin)
            self._graded[bucket] = self._graded[bucket] * fading + 1
            self._kept[bucket] = self._kept[bucket] * fading + (place < num_right)

    def cumulative(self, margins: Sequence[float]) -> Iterator[float]:
        """The probability that a token and all before it are kept, one after the other."""
        mean = _shrunk(sum(self._kept), sum(self._graded), FIRST_GUESS)
        survival = 1.0
        for margin in margins:
            bucket = bisect_right(EDGES, margin)
            survival *= _shrunk(self._kept[bucket], self._graded[bucket], mean)
            yield survival

    def num_worth(self, margins: Sequence[float], price: float) -> int:
        """How many of the first tokens survive with at least `price`; the first always counts.

        Whoever asks for one wants to know: without it nothing would be learned any more.
        """
        if price <= 0:
            return len(margins)
        for place, survival in enumerate(self.cumulative(margins)):
            if survival < price:
                return max(place, 1)
        return len(margins)


def _shrunk(kept: float, graded: float, before: float) -> float:
    return (kept + TRUST * before) / (graded + TRUST)
