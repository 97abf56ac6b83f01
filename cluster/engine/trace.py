"""What a request is told of its steps, for those that are to be traced."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.engine.plan import Plan, Turn
from cluster.messages import Draft, TokenDelta, TracedStep


class DraftReason(StrEnum):
    """Why a sequence had as many drafts verified as it had."""

    REFUSED = "refused"  # the request wants none
    UNASKED = "unasked"  # none would pay, or none would fit
    NONE = "none"  # none came, or none of those that came would pay
    SHORT = "short"  # as many as came and would pay
    FULL = "full"  # as many as were asked for


@dataclass(frozen=True, slots=True)
class _Step:
    """The step that is being committed."""

    began_at: float  # by the tracer's clock, as the next
    ended_at: float
    ended_on: float  # in seconds since 1970
    draft_seconds: float
    num_sequences: int
    step_id: int


class StepTracer:
    """Adds to deltas of requests that ask for it what the step was: the first, and a share of all.

    Steps are told of in the order `ended`, `told` for each of its turns. `clock` is the one that
    `Sequence.arrived_at` is measured by.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step: _Step | None = None

    def ended(self, plan: Plan, *, draft_seconds: float, target_seconds: float) -> None:
        """A step is over, and is about to be committed."""
        now = self._clock()
        self._step = _Step(
            began_at=now - draft_seconds - target_seconds,
            ended_at=now,
            ended_on=time.time(),
            draft_seconds=draft_seconds,
            num_sequences=len(plan.turns),
            step_id=plan.step_id,
        )

    def told(self, turn: Turn, draft: Draft, delta: TokenDelta, *, is_first: bool) -> TokenDelta:
        """The delta that a turn brought, with its step if that is to be told of."""
        step, sequence = self._step, turn.sequence
        ratio = sequence.request.trace_ratio
        if step is None or not ratio:
            return delta
        waits_since = sequence.stepped_at or sequence.arrived_at
        sequence.stepped_at = step.ended_at
        if not (is_first or is_sampled(step.step_id, ratio)):
            return delta
        traced = TracedStep(
            step_id=step.step_id,
            ended_at=step.ended_on,
            wait_seconds=max(step.began_at - waits_since, 0.0),
            draft_seconds=step.draft_seconds,
            verify_seconds=step.ended_at - step.began_at - step.draft_seconds,
            num_sequences=step.num_sequences,
            num_asked=turn.num_drafts,
            num_drafted=delta.num_drafted,
            num_accepted=delta.num_accepted,
            drafter=draft.drafter,
            reason=draft_reason(turn, num_drafted=delta.num_drafted),
        )
        return replace(delta, traced_steps=(traced,))


def is_sampled(step_id: int, ratio: float) -> bool:
    """Whether a step is of the share that is told of: evenly spread, and exactly so many."""
    return int(step_id * ratio) > int((step_id - 1) * ratio)


def draft_reason(turn: Turn, *, num_drafted: int) -> DraftReason:
    """Why `num_drafted` drafts of a turn were verified."""
    if not turn.sequence.request.speculation.enabled:
        return DraftReason.REFUSED
    if not turn.num_drafts:
        return DraftReason.UNASKED
    if not num_drafted:
        return DraftReason.NONE
    return DraftReason.SHORT if num_drafted < turn.num_drafts else DraftReason.FULL
