"""What a step's answers amount to: whether they can be believed, and what each request is told."""

import time
from collections.abc import Mapping

from cluster.control.policy import Outcome
from cluster.engine.plan import Plan, Turn
from cluster.engine.sequence import Sequence
from cluster.errors import TargetUnavailable
from cluster.messages import NO_DRAFT, Draft, SequenceTokens, StepOutput, TokenDelta


def matched(
    plan: Plan, drafts: Mapping[int, Draft], result: StepOutput
) -> dict[int, SequenceTokens]:
    """The target's answers by sequence id. Raises TargetUnavailable if one does not fit."""
    asked = [turn for turn in plan.turns if turn.samples or turn.num_scored]
    if result.step_id != plan.step_id or len(result.sequences) != len(asked):
        raise TargetUnavailable(f"the answer to step {plan.step_id} is of another step")
    for turn, answer in zip(asked, result.sequences, strict=True):
        draft = drafts.get(turn.sequence.seq_id, NO_DRAFT)
        if answer.seq_id != turn.sequence.seq_id or not _fits(turn, draft, answer):
            raise TargetUnavailable(
                f"the answer for sequence {turn.sequence.seq_id} does not follow from its rows"
            )
    return {answer.seq_id: answer for answer in result.sequences}


def outcomes(
    drafts: Mapping[int, Draft], answers: Mapping[int, SequenceTokens]
) -> tuple[Outcome, ...]:
    """What became of the drafts of the sequences that got tokens."""
    return tuple(
        Outcome(seq_id=seq_id, draft=drafts.get(seq_id, NO_DRAFT), num_accepted=answer.num_accepted)
        for seq_id, answer in answers.items()
        if answer.token_ids
    )


def advance(sequence: Sequence, draft: Draft, answer: SequenceTokens) -> TokenDelta:
    """Add the accepted run up to its stop; returns what to tell the request.

    The rows that were no drafts have been counted as computed before.
    """
    begins = not sequence.has_begun
    num_emitted = sequence.extend(answer.token_ids)
    sequence.num_computed_tokens += answer.num_accepted
    return TokenDelta(
        request_id=sequence.request.request_id,
        token_ids=answer.token_ids[:num_emitted],
        logprobs=answer.logprobs[:num_emitted],
        top_logprobs=answer.top_logprobs[:num_emitted],
        prompt_logprobs=tuple(sequence.prompt_logprobs) if begins else (),
        num_cached_tokens=(sequence.num_cached_tokens or 0) if begins else 0,
        num_drafted=len(draft.token_ids),
        num_accepted=min(answer.num_accepted, num_emitted),
        finish_reason=sequence.finish_reason(),
        emitted_at=time.time(),
    )


def _fits(turn: Turn, draft: Draft, answer: SequenceTokens) -> bool:
    """Whether the answer continues the sequence from its draft, with all that was asked for."""
    num_accepted, num_tokens = answer.num_accepted, len(answer.token_ids)
    if answer.error is not None:
        return num_tokens == 0
    request = turn.sequence.request
    return (
        num_tokens == (num_accepted + 1 if turn.samples else 0)
        and 0 <= num_accepted <= len(draft.token_ids)
        and answer.token_ids[:num_accepted] == draft.token_ids[:num_accepted]
        and len(answer.logprobs) == (num_tokens if request.logprobs else 0)
        and len(answer.top_logprobs) == (num_tokens if request.top_logprobs else 0)
        and len(answer.scores) == turn.num_scored
    )
