"""A suffix automaton that grows with a text and weighs what followed each of its substrings.

A state stands for all substrings that end at the same places (Blumer et al., 1985). Its suffix
link leads to the longest of its suffixes that ends at more places; the walk over the links from
the state of the whole text passes all suffixes of the text, the longest first:

    text 1 2 3 1 2      state of 12312, ends at 5     length 5
                          | link
                        state of 12 and 2, ends at 2 and 5     length 2: seen before
                          | link
                        root, the empty string
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

ROOT = 0
MAX_DEPTH = 12


class Match(NamedTuple):
    """A substring of `length` tokens that the reading of some tokens ended with, at its state."""

    state: int
    length: int


@dataclass(frozen=True, slots=True)
class Follower:
    """The likeliest token after a match.

    Of all occurrences those that went on with it have `weight`, those that went on otherwise
    `others`; the newest weighs 1, an older one less.
    """

    token_id: int
    weight: float
    others: float


class SuffixAutomaton:
    """Every substring of a growing text, and how often each token followed it.

    A token costs amortised constant time and at most two states. An occurrence weighs half after
    `half_life` further tokens. It is entered for the `max_depth` longest different contexts
    it stands in, which are all of them in any text but one that runs in a circle.
    """

    def __init__(self, *, half_life: float, max_depth: int = MAX_DEPTH) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._max_depth = max_depth
        self._unit = 1.0  # what an occurrence that ends with the newest token weighs
        self._num_tokens = 0
        self._last = ROOT
        self._next: list[dict[int, int]] = [{}]
        self._link = [ROOT]
        self._length = [0]
        self._weight = [0.0]  # of all places a state's strings end at
        self._followed = [0.0]  # the same without the end of the text
        self._best: list[int | None] = [None]  # the follower of most weight

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return self._num_tokens

    @property
    def num_states(self) -> int:
        """What the memory it takes is proportional to."""
        return len(self._link)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append to the text."""
        for token_id in token_ids:
            before, self._last = self._last, self._state_after(self._last, token_id)
            self._num_tokens += 1
            self._unit *= self._growth
            self._enter(before, token_id)

    def longest(self) -> Match:
        """The longest suffix of the text that occurred before; its length may be 0."""
        return self.shorter(Match(self._last, self._num_tokens))

    def shorter(self, match: Match) -> Match:
        """The longest suffix of a match that ends at more places."""
        state = self._link[match.state]
        return Match(state, self._length[state])

    def after(self, match: Match, token_id: int) -> Match:
        """The longest suffix of a match and one more token that is a substring."""
        state, length = match
        while token_id not in self._next[state]:
            if state == ROOT:
                return Match(ROOT, 0)
            state = self._link[state]
            length = self._length[state]
        return Match(self._next[state][token_id], length + 1)

    def follower(self, match: Match) -> Follower | None:
        """What mostly followed a match, or None where it only ends the text."""
        state = match.state
        token_id = self._best[state]
        if token_id is None:
            return None
        weight = self._weight[self._next[state][token_id]]
        others = max(self._followed[state] - weight, 0.0)
        return Follower(token_id, weight / self._unit, others / self._unit)

    def _state_after(self, state: int, token_id: int) -> int:
        """Add the states that the text and one more token take; returns that of all of it."""
        new = self._add({}, self._length[state] + 1)
        while token_id not in self._next[state]:
            self._next[state][token_id] = new
            if state == ROOT:
                return new
            state = self._link[state]
        self._link[new] = self._split(state, token_id)
        return new

    def _split(self, state: int, token_id: int) -> int:
        """The state of `state`'s longest string and the token, apart from any longer strings."""
        whole = self._next[state][token_id]
        if self._length[whole] == self._length[state] + 1:
            return whole
        part = self._add(dict(self._next[whole]), self._length[state] + 1)
        self._link[part], self._link[whole] = self._link[whole], part
        self._weight[part], self._followed[part] = self._weight[whole], self._followed[whole]
        self._best[part] = self._best[whole]
        while self._next[state].get(token_id) == whole:
            self._next[state][token_id] = part
            if state == ROOT:
                break
            state = self._link[state]
        return part

    def _enter(self, state: int, token_id: int) -> None:
        """Count the new token as what followed the text's suffixes, `state` that of the longest.

        Several suffixes may lead to one state, which is then entered once.
        """
        following, weight, followed, best = self._next, self._weight, self._followed, self._best
        unit, entered = self._unit, ROOT
        for _ in range(self._max_depth):
            after = following[state]
            to = after[token_id]
            followed[state] += unit
            if to != entered:
                weight[to] += unit
                entered = to
            leader = best[state]
            if leader != token_id and (leader is None or weight[to] >= weight[after[leader]]):
                best[state] = token_id
            if state == ROOT:
                return
            state = self._link[state]

    def _add(self, following: dict[int, int], length: int) -> int:
        self._next.append(following)
        self._link.append(ROOT)
        self._length.append(length)
        self._weight.append(0.0)
        self._followed.append(0.0)
        self._best.append(None)
        return len(self._link) - 1
