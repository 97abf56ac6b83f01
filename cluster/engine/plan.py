"""What one step will do: who runs, with which rows, and how many drafts each may bring."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.engine.sequence import Sequence
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, SequenceRows, StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sequence's part of a step.

    It brings its next `num_rows` uncomputed tokens and room for `num_drafts` drafts after them;
    `block_table` covers both.
    """

    sequence: Sequence
    num_rows: int
    num_drafts: int
    block_table: tuple[int, ...]

    @property
    def samples(self) -> bool:
        """Whether these rows reach the sequence's last token, so that the next one is drawn."""
        return self.num_rows == self.sequence.num_uncomputed_tokens

    def rows(self, draft: Draft) -> SequenceRows:
        """The rows as the target takes them."""
        sequence = self.sequence
        start = sequence.num_computed_tokens
        return SequenceRows(
            seq_id=sequence.seq_id,
            block_table=self.block_table,
            start=start,
            token_ids=(*sequence.token_ids[start : start + self.num_rows], *draft.token_ids),
            num_drafts=len(draft.token_ids),
            sampling=sequence.sampling if self.samples else None,
            logprobs=sequence.request.logprobs,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: every turn, and by what each shortened draft was limited."""

    step_id: int
    turns: tuple[Turn, ...]
    draft_limits: tuple[str, ...]

    def queries(self) -> list[DraftQuery]:
        """What to ask the drafter; empty when nobody may bring drafts."""
        return [
            DraftQuery(
                seq_id=turn.sequence.seq_id,
                token_ids=turn.sequence.token_ids,
                num_wanted=turn.num_drafts,
                sampling=turn.sequence.sampling,
            )
            for turn in self.turns
            if turn.num_drafts
        ]

    def input(self, drafts: Mapping[int, Draft]) -> StepInput:
        """The step as the target takes it; a sequence missing in `drafts` brings none."""
        return StepInput(
            self.step_id,
            tuple(turn.rows(drafts.get(turn.sequence.seq_id, Draft())) for turn in self.turns),
        )
