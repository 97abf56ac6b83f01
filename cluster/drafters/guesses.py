"""Where an n-gram draft's next token comes from, and how much each source is to be believed.

A source is read token by token: `guess` says what comes next, `advance` what did. The margin of a
guess is the logarithm of its odds, as seen on greedy answers of a small chat model: a match of
twice the length, or one that went on this way twice as often, or half as often otherwise, has
about e times the odds.
"""

from collections.abc import Sequence
from math import exp, log2
from typing import NamedTuple, Protocol

from cluster.drafters.suffixes import ROOT, Match, SuffixAutomaton
from cluster.drafters.table import CONTEXT_LENGTHS, NgramTable

OWN_LEAD = -0.8  # the margin of one token of the request's own text that was seen once before
MEMORY_LEAD = -2.0  # the same in the tenant's other answers
TABLE_LEAD = -2.0  # and in the operator's table
MAX_MEMORY_MATCH = 16  # tokens that are looked up in other texts, which are read anew every time


class Guess(NamedTuple):
    """A next token and the logarithm of its odds."""

    margin: float
    token_id: int

    @property
    def chance(self) -> float:
        """The same as a probability."""
        return 1.0 / (1.0 + exp(-self.margin))


class Source(Protocol):
    """A text or a table, read up to where a draft goes on."""

    def guess(self) -> Guess | None:
        """What comes next, or None where nothing is known."""
        ...

    def advance(self, token_id: int) -> None:
        """Read one more token."""
        ...


class TextSource:
    """Goes on as the text of an automaton went on where it last said the same.

    Where a match is the end of the text a suffix of it goes on: text that runs in a circle is
    followed round it, and each token read on the way makes the match longer all the same.
    """

    def __init__(self, automaton: SuffixAutomaton, match: Match, *, lead: float) -> None:
        self._automaton = automaton
        self._match = match
        self._length = match.length
        self._lead = lead

    def guess(self) -> Guess | None:
        """What mostly followed the longest match that anything followed."""
        while self._match.length:
            follower = self._automaton.follower(self._match)
            if follower is not None:
                margin = _margin(self._lead, self._length, follower.weight, follower.others)
                return Guess(margin, follower.token_id)
            self._match = self._automaton.shorter(self._match)
        return None

    def advance(self, token_id: int) -> None:
        """Lengthen the match, or fall back to a suffix of it."""
        match = self._automaton.after(self._match, token_id)
        goes_on = match.length > self._match.length
        self._length = self._length + 1 if goes_on else match.length
        self._match = match


class TableSource:
    """Goes on as a table says."""

    def __init__(self, table: NgramTable, token_ids: Sequence[int]) -> None:
        self._table = table
        self._tail = list(token_ids[-max(CONTEXT_LENGTHS) :])

    def guess(self) -> Guess | None:
        """The best of what it has on contexts of any length."""
        best = None
        for length, token_id, count, total in self._table.entries(self._tail):
            margin = _margin(TABLE_LEAD, length, count, total - count)
            if best is None or margin > best.margin:
                best = Guess(margin, token_id)
        return best

    def advance(self, token_id: int) -> None:
        """Move on by one token."""
        self._tail = [*self._tail[1 - max(CONTEXT_LENGTHS) :], token_id]


def own_source(automaton: SuffixAutomaton) -> TextSource:
    """The request's own text, all of which the automaton has read."""
    return TextSource(automaton, automaton.longest(), lead=OWN_LEAD)


def memory_source(automaton: SuffixAutomaton, token_ids: Sequence[int]) -> TextSource:
    """Other text, where it says the same as the last of these tokens."""
    source = TextSource(automaton, Match(ROOT, 0), lead=MEMORY_LEAD)
    for token_id in token_ids[-MAX_MEMORY_MATCH:]:
        source.advance(token_id)
    return source


def _margin(lead: float, length: int, weight: float, others: float) -> float:
    """Grows with the match and with the share of the occurrences that went on this way."""
    return lead + log2(length * weight / (1.0 + others))
