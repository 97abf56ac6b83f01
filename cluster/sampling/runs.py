"""The rows of a step that are sampled, sequence by sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.messages import SamplingSpec, SequenceRows

GREEDY = SamplingSpec(seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """The sampled rows of one sequence: its last committed token, and each of its drafts.

    They are `rows` of the step's flat batch and draw tokens for `positions`. `mask`, bool
    `[rows, vocab]`, is what a grammar allows there.
    """

    sequence: SequenceRows
    sampling: SamplingSpec
    rows: range
    positions: range
    mask: Tensor | None = None

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """The drafts: all rows but the first."""
        token_ids = self.sequence.token_ids
        return token_ids[len(token_ids) - self.sequence.num_drafts :]

    @property
    def wants_largest(self) -> bool:
        """Whether the largest logit of every row is all there is to know."""
        sampling, asked = self.sampling, self.sequence
        plain = replace(
            GREEDY,
            seed=sampling.seed,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            suppressed_token_ids=sampling.suppressed_token_ids,
            suppressed_before=sampling.suppressed_before,
            num_prompt_tokens=sampling.num_prompt_tokens,
        )
        return (
            sampling == plain
            and self.positions.start >= sampling.suppressed_before
            and asked.grammar is None
            and not (asked.logprobs or asked.top_logprobs)
        )

    def histories(self) -> list[tuple[int, ...]]:
        """All tokens before the one each row draws, or nothing where nobody looks back."""
        if not self.sampling.needs_history:
            return [()] * len(self.rows)
        known = self.sequence.history_token_ids + self.sequence.token_ids
        return [known[:position] for position in self.positions]


def runs_of(sequences: Sequence[SequenceRows]) -> list[Run]:
    """The runs of a step. Raises ValueError when a sequence has drafts but no row before them."""
    runs: list[Run] = []
    end = 0
    for sequence in sequences:
        num_rows, num_sampled = len(sequence.token_ids), sequence.num_drafts + 1
        end += num_rows
        if sequence.sampling is None:
            continue
        if num_sampled > num_rows:
            message = f"sequence {sequence.seq_id}: {sequence.num_drafts} drafts in {num_rows} rows"
            raise ValueError(message)
        stop = sequence.start + num_rows + 1
        positions = range(stop - num_sampled, stop)
        runs.append(Run(sequence, sequence.sampling, range(end - num_sampled, end), positions))
    return runs


def joined_masks(runs: Sequence[Run], like: Tensor) -> Tensor | None:
    """The masks of all runs for their rows of logits `like`, or None when no run has one."""
    if all(run.mask is None for run in runs):
        return None
    masks = torch.ones_like(like, dtype=torch.bool)
    first = 0
    for run in runs:
        if run.mask is not None:
            masks[first : first + len(run.rows)] = run.mask
        first += len(run.rows)
    return masks
