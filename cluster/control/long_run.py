"""What a second is worth: what steps bring in the long run, and not only at the moment.

Drafts are easier at some times than at others. To bring most tokens over all of it every second
has the same price, that of the average: a hard stretch is no reason to verify what an easy one
would refuse (it is passed faster in plain steps).
"""

from dataclasses import dataclass

from cluster.control.cost import CostTable
from cluster.control.policy import StepRecord

WINDOW = 600  # steps after which an old one counts a third
EXPECTED_STEPS = 20.0  # that count as much as what is expected before there are any


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    seconds: float = 0.0


class LongRun:
    """How much faster steps are than plain ones, on average over many of about the same load.

    Both tokens and seconds are parts of a plain step's, so that neither a machine that slows down
    nor another number of sequences makes the average wrong. Loads are apart by factors of two.
    """

    def __init__(self) -> None:
        self._by_load: dict[int, _Sums] = {}

    def speedup(self, num_sequences: int, *, expected: float) -> float:
        """At least 1, since plain steps can be had; as `expected` while little was seen."""
        sums = self._by_load.get(num_sequences.bit_length())
        if sums is None:
            return max(expected, 1.0)
        tokens = sums.tokens + EXPECTED_STEPS * expected
        return max(tokens / (sums.seconds + EXPECTED_STEPS), 1.0)

    def observe(self, record: StepRecord, cost: CostTable) -> None:
        """Learn from a step, whose seconds are taken as the cost table has them."""
        shape = record.shape
        num_drafts = sum(len(outcome.draft.token_ids) for outcome in record.outcomes)
        num_accepted = sum(outcome.num_accepted for outcome in record.outcomes)
        seconds = cost.seconds(shape, num_drafts) + record.draft_seconds
        sums = self._by_load.setdefault(shape.num_sequences.bit_length(), _Sums())
        kept = 1 - 1 / WINDOW
        sums.tokens = kept * sums.tokens + 1 + num_accepted / max(shape.num_sequences, 1)
        sums.seconds = kept * sums.seconds + seconds / cost.seconds(shape)
