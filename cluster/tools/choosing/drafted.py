"""What became of drafts, step by step: how many tokens were drafted and how many were kept."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Steps:
    """Steps of sequences that were to have drafts, each as (drafted, kept)."""

    outcomes: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(self.outcomes + other.outcomes)

    def first(self, num_positions: int) -> "Steps":
        """The same with drafts that end there."""
        return Steps(
            tuple(
                (min(drafted, num_positions), min(kept, num_positions))
                for drafted, kept in self.outcomes
            )
        )

    @property
    def num_drafted(self) -> int:
        """Tokens that were verified."""
        return sum(drafted for drafted, _ in self.outcomes)

    @property
    def num_kept(self) -> int:
        """Tokens that were accepted."""
        return sum(kept for _, kept in self.outcomes)

    @property
    def acceptance_rate(self) -> float | None:
        """Kept over drafted; None where nothing was drafted."""
        return self.num_kept / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step brings, its own included."""
        return 1 + self.num_kept / max(len(self.outcomes), 1)

    @property
    def wasted_a_step(self) -> float:
        """Tokens that a step verifies for nothing."""
        return (self.num_drafted - self.num_kept) / max(len(self.outcomes), 1)

    @property
    def coverage(self) -> float:
        """The part of the steps that had a draft at all."""
        return sum(drafted > 0 for drafted, _ in self.outcomes) / max(len(self.outcomes), 1)

    @cached_property
    def survival(self) -> tuple[float, ...]:
        """By position: of the drafts that reach it, those that are kept up to there."""
        return tuple(self._survival())

    def _survival(self) -> Iterator[float]:
        longest = max((drafted for drafted, _ in self.outcomes), default=0)
        for position in range(1, longest + 1):
            kept = [kept >= position for drafted, kept in self.outcomes if drafted >= position]
            yield sum(kept) / len(kept)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "num_steps": len(self.outcomes),
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_kept,
            "acceptance_length": self.acceptance_length,
            "draft_acceptance_rate": self.acceptance_rate,
            "coverage": self.coverage,
            "survival_by_position": list(self.survival),
        }


def together(parts: Iterable[Steps]) -> Steps:
    """All of them."""
    return Steps(tuple(outcome for part in parts for outcome in part.outcomes))
