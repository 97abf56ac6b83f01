"""For comparison: one number for the whole batch, by tiers of how many drafts were kept lately."""

from collections.abc import Sequence

from cluster.control.policy import FixedPolicy, StepRecord

EMA_RATE = 0.2
STEPS_BETWEEN_CHANGES = 5
HEADROOM = 1.0  # a tier is left upwards when all but this many of its drafts are kept


class TieredPolicy(FixedPolicy):
    """Guesses about one further than is accepted, in tiers; it does not know what a step costs.

    Every STEPS_BETWEEN_CHANGES steps the tier is the lowest that is above the mean number of
    drafts accepted lately by HEADROOM, or the highest.
    """

    def __init__(self, tiers: Sequence[int] = (1, 2, 4, 8)) -> None:
        self._tiers = tuple(sorted(tiers))
        super().__init__(self._tiers[len(self._tiers) // 2])
        self._num_accepted = self._num_speculative_tokens / 2
        self._num_steps = 0

    def observe(self, record: StepRecord) -> None:
        """Move the mean, and now and then the tier."""
        drafted = [outcome for outcome in record.outcomes if outcome.draft.token_ids]
        if not drafted:
            return
        mean = sum(outcome.num_accepted for outcome in drafted) / len(drafted)
        self._num_accepted += EMA_RATE * (mean - self._num_accepted)
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_CHANGES == 0:
            wanted = self._num_accepted + HEADROOM
            self._num_speculative_tokens = next(
                (tier for tier in self._tiers if tier >= wanted), self._tiers[-1]
            )
