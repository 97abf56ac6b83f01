"""The two things an engine knows besides itself: a target and a drafter."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import Draft, SamplingSpec, StepInput, StepOutput


@dataclass(frozen=True, slots=True)
class TargetMemory:
    """Where the target holds a sequence: its first `num_computed` tokens, and room for drafts."""

    block_table: tuple[int, ...]
    num_computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuery:
    """Asks for up to `num_wanted` tokens after `token_ids`, all committed tokens so far.

    `token_ids` is the engine's own list: read it, never keep or change it.
    """

    seq_id: int
    token_ids: Sequence[int]
    num_wanted: int
    sampling: SamplingSpec
    price: float = 0.0  # the survival below which a draft position does not pay
    cache_salt: str = ""  # what requests said is shared between those of one salt only
    memory: TargetMemory | None = None  # for drafters beside the target, until its next step


class Target(Protocol):
    """The model whose distribution is kept."""

    async def step(self, step: StepInput) -> StepOutput:
        """Compute all rows in one forward pass, then sample and verify.

        Raises TargetUnavailable when the target is gone.
        """
        ...


class Drafter(Protocol):
    """Guesses ahead. Whatever it answers, or fails to, costs speed only.

    `context_limit` is the longest context plus draft it can hold, None for no limit.
    """

    @property
    def name(self) -> str:
        """The name in metrics and in GetModel."""
        ...

    @property
    def context_limit(self) -> int | None:
        """Tokens of context and draft together that fit, or None."""
        ...

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Drafts by sequence id; a sequence that is missing gets none.

        The engine cancels the call at its deadline. Raises DrafterUnavailable.
        """
        ...

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended. Never blocks, never fails."""
        ...
