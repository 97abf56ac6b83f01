"""How far ahead to guess: asked before a step, told what came of it.

choose    for which sequences to ask for drafts, and for how many
admit     how many of the drafts that came to verify
observe   what was accepted, and what the step took
learn     from that; while the target computes, so that no step waits for it
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence that could bring drafts. Its `max_drafts` is the caller's cap, None for none.

    `urgency` multiplies what its tokens are worth: above 1 where its deadline is near.
    """

    seq_id: int
    num_tokens: int  # committed so far
    max_drafts: int | None = None
    priority: int = 0
    urgency: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step holds before any draft: `num_context_tokens` are those its rows look back on."""

    num_sequences: int
    num_rows: int
    num_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One sequence's verified draft, which may be empty; `num_accepted` is the target's say."""

    seq_id: int
    draft: Draft
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step turned out to be. `draft_seconds` are those the engine waited for drafts."""

    shape: StepShape
    outcomes: tuple[Outcome, ...]
    draft_seconds: float
    target_seconds: float


class Policy(Protocol):
    """Decides how many drafts pay. It only asks: the scheduler clamps what it asks for.

    `price_floor` is the least price of a draft position, in survival, that others ask for when
    rows are wanted for more than drafts; 0 when they do not.
    """

    price_floor: float

    @property
    def price(self) -> float:
        """The survival below which a draft position does not pay now; 0 when all do."""
        ...

    @property
    def patience_seconds(self) -> float:
        """How long the drafts that were chosen last are worth waiting for."""
        ...

    def choose(self, candidates: Sequence[Candidate], shape: StepShape) -> Mapping[int, int]:
        """Drafts to ask for, by sequence id; a sequence that is missing gets none."""
        ...

    def admit(self, drafts: Mapping[int, Draft], shape: StepShape) -> Mapping[int, int]:
        """How many of each draft's tokens to verify, by sequence id; one that is missing none.

        Not asked under Rule.RATIO, where the drafts of a step must not decide how many count.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Note what became of the step that was chosen last."""
        ...

    def learn(self) -> None:
        """Learn from what was noted, if there is any; best while nobody waits."""
        ...

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Sequences ended."""
        ...


class FixedPolicy:
    """The same number for every sequence at every step, whatever it costs."""

    price_floor = 0.0

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    @property
    def price(self) -> float:
        """Nothing is too dear."""
        return 0.0

    @property
    def patience_seconds(self) -> float:
        """No wait is too long."""
        return math.inf

    def choose(self, candidates: Sequence[Candidate], shape: StepShape) -> Mapping[int, int]:
        """`num_speculative_tokens` for each of them."""
        del shape
        return {each.seq_id: self._num_speculative_tokens for each in candidates}

    def admit(self, drafts: Mapping[int, Draft], shape: StepShape) -> Mapping[int, int]:
        """All that came."""
        del shape
        return {seq_id: len(draft.token_ids) for seq_id, draft in drafts.items()}

    def observe(self, record: StepRecord) -> None:
        """Nothing is noted."""

    def learn(self) -> None:
        """Nothing is learned."""

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Nothing is kept."""
