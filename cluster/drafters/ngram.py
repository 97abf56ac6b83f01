"""Prompt lookup: what followed the last few tokens when they occurred before is likely to follow.

The idea is "Prompt Lookup Decoding" (Saxena, 2023). A draft is a copy that may overlap its own
output, as in LZ77: when the copied run reaches the end of the context it goes on over the tokens
just proposed, so that text of period 1 or 2 still drafts as many tokens as are wanted.
"""

from collections.abc import Iterable, Mapping, Sequence

from cluster.interfaces import DraftQuery
from cluster.messages import Draft


class NgramDrafter:
    """Proposes what followed the longest suffix of a sequence's context that occurred before.

    Suffixes of `max_match` down to `min_match` tokens are tried, the longest first. Of several
    occurrences the most recent one wins: text repeats its neighbourhood, and a sequence that has
    fallen into a loop should follow the loop. Only the sequence's own context is searched, so
    nothing one request said can surface in another.

    A call costs O(new tokens * max_match) per sequence, however long the context.
    """

    def __init__(self, max_match: int = 3, min_match: int = 1) -> None:
        if not 1 <= min_match <= max_match:
            message = f"1 <= min_match {min_match} <= max_match {max_match} does not hold"
            raise ValueError(message)
        self._match_lengths = range(max_match, min_match - 1, -1)
        self._indexes: dict[int, _SuffixIndex] = {}

    @property
    def name(self) -> str:
        """The name in metrics and in GetModel."""
        return "ngram"

    @property
    def context_limit(self) -> int | None:
        """No limit: a context costs a few dictionary entries a token."""
        return None

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Drafts by sequence id; a sequence whose last tokens are all new gets none."""
        drafts: dict[int, Draft] = {}
        for query in queries:
            if query.num_wanted < 1:
                continue
            source = self._index_of(query).find(query.token_ids)
            if source is not None:
                drafts[query.seq_id] = Draft(_copy(query.token_ids, source, query.num_wanted))
        return drafts

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for seq_id in seq_ids:
            self._indexes.pop(seq_id, None)

    def _index_of(self, query: DraftQuery) -> "_SuffixIndex":
        index = self._indexes.get(query.seq_id)
        if index is None or not index.covers_a_prefix_of(query.token_ids):
            index = _SuffixIndex(self._match_lengths)
            self._indexes[query.seq_id] = index
        index.extend(query.token_ids)
        return index


class _SuffixIndex:
    """Where each n-gram of one growing context was last continued.

    `_next_position[ngram]` is the position of the token that followed its latest occurrence. The
    n-grams that end the context have no follower yet and are entered when it comes.
    """

    def __init__(self, match_lengths: range) -> None:
        self._match_lengths = match_lengths
        self._next_position: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._last_token_id: int | None = None

    def covers_a_prefix_of(self, token_ids: Sequence[int]) -> bool:
        """Whether the indexed tokens can be the start of `token_ids` (length and last token)."""
        if self._num_indexed == 0:
            return True
        return (
            self._num_indexed <= len(token_ids)
            and token_ids[self._num_indexed - 1] == self._last_token_id
        )

    def extend(self, token_ids: Sequence[int]) -> None:
        """Enter the n-grams that the tokens since the last call follow."""
        for length in self._match_lengths:
            first = max(self._num_indexed, length)  # the first new position that n tokens precede
            read = token_ids[first - length : len(token_ids) - 1]
            ngrams = zip(*(read[offset:] for offset in range(length)), strict=False)
            self._next_position.update(zip(ngrams, range(first, len(token_ids)), strict=False))
        self._num_indexed = len(token_ids)
        self._last_token_id = token_ids[-1] if token_ids else None

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The position that followed the longest suffix seen before, or None."""
        for length in self._match_lengths:
            if length < len(token_ids):
                position = self._next_position.get(tuple(token_ids[-length:]))
                if position is not None:
                    return position
        return None


def _copy(token_ids: Sequence[int], source: int, num_tokens: int) -> tuple[int, ...]:
    """`num_tokens` tokens from position `source` on, repeating over the copy when it runs out."""
    copied = list(token_ids[source : source + num_tokens])
    period = len(token_ids) - source
    while len(copied) < num_tokens:
        copied.append(copied[-period])
    return tuple(copied)
