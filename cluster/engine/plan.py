"""What one step will do: who runs, with which rows, and how many drafts each may bring."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.control.policy import StepShape
from cluster.engine.limits import EngineLimits
from cluster.engine.sequence import Sequence
from cluster.interfaces import DraftQuery, TargetMemory
from cluster.messages import NO_DRAFT, BlockCopy, Draft, Rule, SequenceRows, StepInput


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

    @property
    def memory(self) -> TargetMemory:
        """Where the target holds the sequence."""
        return TargetMemory(self.block_table, self.sequence.num_computed_tokens)

    @property
    def num_scored(self) -> int:
        """How many of the first rows are asked for the logprob of the prompt token after them.

        None when all of these are known: the sequence was put back after they were scored.
        """
        start = self.sequence.num_computed_tokens
        stop = min(start + self.num_rows, self.sequence.num_scores_wanted)
        return stop - start if stop > len(self.sequence.prompt_logprobs) else 0

    def rows(self, draft: Draft) -> SequenceRows:
        """The rows as the target takes them."""
        sequence, request = self.sequence, self.sequence.request
        start = sequence.num_computed_tokens
        needs_history = sequence.sampling.needs_history or request.grammar is not None
        return SequenceRows(
            seq_id=sequence.seq_id,
            block_table=self.block_table,
            start=start,
            token_ids=(*sequence.token_ids[start : start + self.num_rows], *draft.token_ids),
            num_drafts=len(draft.token_ids),
            sampling=sequence.sampling if self.samples else None,
            grammar=request.grammar,
            history_token_ids=tuple(sequence.token_ids[:start]) if needs_history else (),
            draft_distributions=draft.distributions,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            scored_token_ids=tuple(sequence.token_ids[start + 1 : start + 1 + self.num_scored]),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: every turn, and by what each shortened draft was limited.

    The copies come before all rows. `admitted` are the sequences that run for the first time,
    `num_preempted` were put back. A sequence may run without a turn.
    """

    step_id: int
    turns: tuple[Turn, ...]
    draft_limits: tuple[str, ...]
    price: float = 0.0  # of a draft position
    copies: tuple[BlockCopy, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    num_preempted: int = 0

    @property
    def shape(self) -> StepShape:
        """What the step holds before any draft."""
        return shape_of([(turn.sequence, turn.num_rows) for turn in self.turns])

    @property
    def decodes(self) -> bool:
        """Whether it has a row that is not of a prompt."""
        return any(turn.num_rows == 1 for turn in self.turns)

    def cost(self, limits: EngineLimits) -> float:
        """Its rows without drafts, those of prompts by what they look back on."""
        return sum(
            1.0
            if turn.num_rows == 1
            else limits.prompt_cost(turn.num_rows, turn.sequence.num_computed_tokens)
            for turn in self.turns
        )

    def queries(self) -> list[DraftQuery]:
        """What to ask the drafter; empty when nobody may bring drafts."""
        copied = {copy.target for copy in self.copies}  # in the step, and not before
        return [
            DraftQuery(
                seq_id=turn.sequence.seq_id,
                token_ids=turn.sequence.token_ids,
                num_wanted=turn.num_drafts,
                sampling=turn.sequence.sampling,
                price=self.price,
                cache_salt=turn.sequence.request.cache_salt,
                memory=turn.memory if copied.isdisjoint(turn.block_table) else None,
            )
            for turn in self.turns
            if turn.num_drafts
        ]

    def input(self, drafts: Mapping[int, Draft], *, rule: Rule = Rule.COUPLED) -> StepInput:
        """The step as the target takes it; a sequence missing in `drafts` brings none."""
        return StepInput(
            self.step_id,
            tuple(turn.rows(drafts.get(turn.sequence.seq_id, NO_DRAFT)) for turn in self.turns),
            copies=self.copies,
            rule=rule,
        )


def shape_of(rows: Iterable[tuple[Sequence, int]]) -> StepShape:
    """The shape of a step in which sequences bring so many rows."""
    rows = tuple(rows)
    return StepShape(
        num_sequences=len(rows),
        num_rows=sum(num_rows for _, num_rows in rows),
        num_context_tokens=sum(
            sequence.num_computed_tokens + num_rows for sequence, num_rows in rows
        ),
    )
