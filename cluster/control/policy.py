"""How far ahead to guess: asked once a step, for all sequences that could bring drafts."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Policy(Protocol):
    """Chooses how many drafts pay. It only asks: the scheduler clamps what it asks for."""

    def choose(self, seq_ids: Sequence[int], *, num_rows: int) -> Mapping[int, int]:
        """Drafts wanted by sequence id, for a step that already has `num_rows` rows.

        A sequence that is missing gets none.
        """
        ...


class FixedPolicy:
    """The same number for every sequence at every step."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def choose(self, seq_ids: Sequence[int], *, num_rows: int) -> Mapping[int, int]:  # noqa: ARG002 - the cost of a row is not this policy's concern
        """`num_speculative_tokens` for each of them."""
        return dict.fromkeys(seq_ids, self._num_speculative_tokens)
