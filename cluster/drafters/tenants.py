"""What tenants' requests were answered lately: each tenant's for that tenant only."""

from collections import OrderedDict
from collections.abc import Sequence

from cluster.drafters.guesses import TextSource, memory_source
from cluster.drafters.suffixes import SuffixAutomaton

MAX_TENANTS = 64
HALF_LIFE = 20_000.0


class TenantMemory:
    """Recent answers by cache salt, at most `num_tokens` of each of the last MAX_TENANTS tenants.

    A salt's answers are found under that salt only.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._texts: OrderedDict[str, _RecentText] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens held, of all tenants."""
        return sum(text.num_tokens for text in self._texts.values())

    def add(self, cache_salt: str, token_ids: Sequence[int]) -> None:
        """Remember an answer."""
        text = self._texts.pop(cache_salt, None) or _RecentText(self._num_tokens // 2)
        text.add(token_ids)
        self._texts[cache_salt] = text
        if len(self._texts) > MAX_TENANTS:
            self._texts.popitem(last=False)

    def sources(self, cache_salt: str, token_ids: Sequence[int]) -> list[TextSource]:
        """What the salt's answers say on the last of these tokens."""
        text = self._texts.get(cache_salt)
        if text is None:
            return []
        self._texts.move_to_end(cache_salt)
        return [memory_source(half, token_ids) for half in text.halves]


class _RecentText:
    """The last `capacity` to two times `capacity` tokens, as two halves: the full and the new one.

    Answers end with a number that is no token id and not used twice, so no match goes on over it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_answers = 0
        self.halves = [SuffixAutomaton(half_life=HALF_LIFE)]

    @property
    def num_tokens(self) -> int:
        return sum(half.num_tokens for half in self.halves)

    def add(self, token_ids: Sequence[int]) -> None:
        token_ids = token_ids[: max(self._capacity - 1, 0)]
        if self.halves[-1].num_tokens + len(token_ids) + 1 > self._capacity:
            self.halves = [self.halves[-1], SuffixAutomaton(half_life=HALF_LIFE)]
        self._num_answers += 1
        self.halves[-1].extend([*token_ids, -self._num_answers])
