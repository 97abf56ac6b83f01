"""For comparison: drafting is off above a batch size."""

from collections.abc import Mapping, Sequence

from cluster.control.policy import Candidate, FixedPolicy, StepShape


class BatchSizePolicy(FixedPolicy):
    """The same number for every sequence, and none when more than `max_num_sequences` decode.

    It knows neither what a step costs nor which drafts are kept.
    """

    def __init__(self, num_speculative_tokens: int, *, max_num_sequences: int) -> None:
        super().__init__(num_speculative_tokens)
        self._max_num_sequences = max_num_sequences

    def choose(self, candidates: Sequence[Candidate], shape: StepShape) -> Mapping[int, int]:
        """All or nobody."""
        if shape.num_sequences > self._max_num_sequences:
            return {}
        return super().choose(candidates, shape)
