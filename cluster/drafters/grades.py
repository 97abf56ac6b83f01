"""What a drafter's proposals turned out to be worth, whether they were used or not.

A proposal is graded by the tokens that the target went on with: right up to the first place where
the two part, unknown after it. So a drafter that was not used learns as much as one that was.
"""

from collections.abc import Sequence

from cluster.drafters.survival import Survival
from cluster.messages import Draft

FIRST_GUESS = 0.7  # the chance of a token of a drafter that was never graded
TRUST = 8.0  # graded tokens that weigh as much as what is believed before
ALL_MEMORY = 512.0  # graded tokens after which an old one counts for little
ONE_MEMORY = 64.0  # the same of one sequence


class Grades:
    """The chance that a drafted token is right, given that those before it are.

    Of all sequences and of each, which is drawn towards all while it has seen little. Where
    a proposal comes with margins they decide.
    """

    def __init__(self) -> None:
        self._by_margin = Survival()
        self._all = _Tally(ALL_MEMORY)
        self._each: dict[int, _Tally] = {}

    def observe(self, seq_id: int, draft: Draft, followed: Sequence[int]) -> None:
        """Grade a proposal by what followed in its place."""
        num_known = min(len(draft.token_ids), len(followed))
        num_right = 0
        while num_right < num_known and draft.token_ids[num_right] == followed[num_right]:
            num_right += 1
        own = self._each.setdefault(seq_id, _Tally(ONE_MEMORY))
        for tally in (self._all, own):
            tally.add(num_right, min(num_right + 1, num_known))
        self._by_margin.observe(draft.margins, num_right, num_known)

    def expected(self, seq_id: int, num_tokens: int) -> float:
        """How many of so many tokens would be right, before they are proposed."""
        chance = self._all.chance(FIRST_GUESS)
        if seq_id in self._each:
            chance = self._each[seq_id].chance(chance)
        return sum(chance**count for count in range(1, num_tokens + 1))

    def expected_of(self, seq_id: int, draft: Draft) -> float:
        """How many tokens of a proposal are right."""
        if draft.margins:
            return sum(self._by_margin.cumulative(draft.margins))
        return self.expected(seq_id, len(draft.token_ids))

    def forget(self, seq_id: int) -> None:
        """A sequence ended."""
        self._each.pop(seq_id, None)

    @property
    def num_sequences(self) -> int:
        """Sequences that something is kept about."""
        return len(self._each)


class _Tally:
    """Right ones of the graded tokens, older ones fading."""

    def __init__(self, memory: float) -> None:
        self._fading = 1 - 1 / memory
        self._right = 0.0
        self._graded = 0.0

    def add(self, num_right: int, num_graded: int) -> None:
        fading = self._fading**num_graded
        self._right = self._right * fading + num_right
        self._graded = self._graded * fading + num_graded

    def chance(self, before: float) -> float:
        return (self._right + TRUST * before) / (self._graded + TRUST)
