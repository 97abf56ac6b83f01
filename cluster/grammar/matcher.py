"""How far one answer has come in its grammar, and what may follow."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from cluster.errors import GrammarFailed


class Matcher:
    """Follows the tokens of one answer through a grammar, forwards and back.

    `compiled` belongs to it alone and has an entry more than `vocab_size`: the library's own EOS.
    The model's are never read as text; after one of them only they may follow.
    """

    def __init__(
        self, compiled: LLMatcher, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._known_eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._text: list[int] = []  # what the library has read
        self._ends: list[int] = []  # EOS tokens after that

    @property
    def may_end(self) -> bool:
        """Whether the text so far matches as a whole."""
        return bool(self._compiled.is_accepting())

    def follow(self, token_ids: Sequence[int]) -> int:
        """Stand after these tokens, wherever it stood: how many of them the grammar takes.

        Raises GrammarFailed when the library gives up.
        """
        held = [*self._text, *self._ends]
        common = _common_length(held, token_ids)
        self._rewind(len(held) - common)
        for place in range(common, len(token_ids)):
            if not self.take(token_ids[place]):
                return place
        return len(token_ids)

    def take(self, token_id: int) -> bool:
        """Go on by one token, unless the grammar refuses it. Raises GrammarFailed."""
        if token_id in self._eos_token_ids:
            if not self._ends and not self.may_end:
                return False
            self._ends.append(token_id)
            return True
        if self._ends or not 0 <= token_id < self._vocab_size:
            return False
        taken = self._compiled.try_consume_tokens([token_id]) == 1
        self._check()
        if taken:
            self._text.append(token_id)
        return taken

    def allowed(self) -> NDArray[np.bool_]:
        """What may come next, `[vocab]`. Raises GrammarFailed when the library gives up."""
        if self._ends:
            allowed = np.zeros(self._vocab_size, dtype=np.bool_)
            allowed[self._known_eos] = True
            return allowed
        bits = np.frombuffer(self._compiled.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._known_eos] = self.may_end
        return allowed

    def _rewind(self, num_tokens: int) -> None:
        """Go back by that many tokens."""
        num_ends = min(num_tokens, len(self._ends))
        del self._ends[len(self._ends) - num_ends :]
        num_read = num_tokens - num_ends
        if num_read and not self._compiled.rollback(num_read):
            raise GrammarFailed("the grammar cannot be rolled back")
        del self._text[len(self._text) - num_read :]

    def _check(self) -> None:
        if self._compiled.is_error():
            reason = self._compiled.get_error().partition("\n")[0]
            raise GrammarFailed(f"the grammar cannot be followed: {reason}")


def _common_length(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Tokens at the beginning that both have."""
    shorter = min(len(held), len(wanted))
    if list(held[:shorter]) == list(wanted[:shorter]):
        return shorter
    return next(place for place in range(shorter) if held[place] != wanted[place])
