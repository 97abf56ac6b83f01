"""What an n-gram drafter would have brought to answers that are known: no model runs."""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.drafters.ngram import NgramDrafter
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, SamplingSpec


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and what the target answered."""

    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Yield:
    """Drafts verified and kept over a number of steps that follow an answer's first token."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __add__(self, other: "Yield") -> "Yield":
        return Yield(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
        )

    @property
    def accepted_per_step(self) -> float:
        """Tokens that a step brings beside its own."""
        return self.num_accepted / max(self.num_steps, 1)

    @property
    def drafted_per_step(self) -> float:
        """Drafts that a step verifies."""
        return self.num_drafted / max(self.num_steps, 1)


def replay(
    drafter: NgramDrafter, answers: Iterable[Answered], *, num_speculative_tokens: int
) -> Yield:
    """Decode the answers again with the drafter's drafts, one after the other."""
    total = Yield()
    for seq_id, answered in enumerate(answers):
        total += _replayed(drafter, answered, seq_id, num_speculative_tokens)
        drafter.release((seq_id,))
    return total


def _replayed(drafter: NgramDrafter, answered: Answered, seq_id: int, limit: int) -> Yield:
    """One answer, step by step, each a draft and the target's own next token."""
    token_ids = [*answered.prompt_token_ids, *answered.answer_token_ids[:1]]
    left = answered.answer_token_ids[1:]
    sampling = SamplingSpec(
        seed=0, temperature=0.0, num_prompt_tokens=len(answered.prompt_token_ids)
    )
    total = Yield()
    while left:
        query = DraftQuery(
            seq_id=seq_id,
            token_ids=token_ids,
            num_wanted=min(limit, len(left) - 1),
            sampling=sampling,
        )
        draft = drafter.drafts([query]).get(seq_id, Draft())
        num_accepted = _num_equal(draft.token_ids, left)
        total += Yield(1, len(draft.token_ids), num_accepted)
        token_ids += left[: num_accepted + 1]
        left = left[num_accepted + 1 :]
    return total


def _num_equal(draft: tuple[int, ...], token_ids: tuple[int, ...]) -> int:
    """Tokens before the first that differs."""
    for count, (drafted, token_id) in enumerate(zip(draft, token_ids, strict=False)):
        if drafted != token_id:
            return count
    return min(len(draft), len(token_ids))
