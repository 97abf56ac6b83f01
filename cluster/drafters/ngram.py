"""Drafts from text: what followed the last tokens when they occurred before is likely to follow.

The idea is "Prompt Lookup Decoding" (Saxena, 2023), here with the longest match of any length and
with counts of what followed it. A draft is made token by token and may go on over what it has just
proposed, as a copy in LZ77 does, so that text of period 1 or 2 drafts as many tokens as are wanted.
"""

from collections.abc import Iterable, Mapping, Sequence

from cluster.drafters.guesses import Source, TableSource, own_source
from cluster.drafters.suffixes import SuffixAutomaton
from cluster.drafters.table import NgramTable
from cluster.drafters.tenants import TenantMemory
from cluster.interfaces import DraftQuery
from cluster.messages import Draft

NAME = "ngram"
HALF_LIFE = 4_000.0  # tokens after which an occurrence in the own text counts half
MAX_INDEXED_TOKENS = 16_384  # of one sequence; about 600 bytes each
MAX_NEW_TOKENS = 2_048  # taken in by one call, 3 to 4 us each
MARGIN_ORIGIN = -4.0  # under all odds that are drafted at, so that no margin is negative
CONTEXT_OF_ANSWER = 3  # tokens of the prompt's end that an answer is remembered with


class NgramDrafter:
    """Proposes what is likeliest by a sequence's own text, its tenant's recent answers, a table.

    The own text is always read. The other two are optional: up to `tenant_memory_tokens` of what
    requests of the same cache salt were answered, and a table that an operator made. Nothing one
    request said can surface in a request of another salt.

    A draft ends where a token is not likely to be reached and right: less than `least_survival`, or
    than the query's price. Margins are logarithms of odds, from MARGIN_ORIGIN on.

    A call costs O(new tokens + drafted tokens) per sequence; a long new context is taken in over
    several calls, and drafted for when that is done.
    """

    def __init__(
        self,
        *,
        table: NgramTable | None = None,
        tenant_memory_tokens: int = 0,
        least_survival: float = 0.02,
    ) -> None:
        self._table = table
        self._least_survival = least_survival
        self._memory = TenantMemory(tenant_memory_tokens) if tenant_memory_tokens else None
        self._texts: dict[int, _OwnText] = {}

    @property
    def name(self) -> str:
        """The name in metrics and in GetModel."""
        return NAME

    @property
    def context_limit(self) -> int | None:
        """No limit: of a very long context the end is searched."""
        return None

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Drafts by sequence id; a sequence of which nothing is likely gets none."""
        return self.drafts(queries)

    def drafts(self, queries: Sequence[DraftQuery]) -> dict[int, Draft]:
        """The same at once, for whoever does not wait."""
        room = MAX_NEW_TOKENS
        drafts: dict[int, Draft] = {}
        asked = [(self._text_of(query), query) for query in queries if query.num_wanted > 0]
        for text, query in sorted(asked, key=lambda each: each[0].num_unread(each[1].token_ids)):
            room -= text.read(query.token_ids, room)
            if not text.num_unread(query.token_ids):
                draft = self._draft(text, query)
                if draft.token_ids:
                    drafts[query.seq_id] = draft
        return drafts

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended, but for what their tenants' next requests may use."""
        for seq_id in seq_ids:
            text = self._texts.pop(seq_id, None)
            if text is not None and self._memory is not None and text.answer:
                self._memory.add(text.cache_salt, text.answer)

    def _text_of(self, query: DraftQuery) -> "_OwnText":
        text = self._texts.get(query.seq_id)
        if text is None or not text.is_start_of(query.token_ids):
            text = _OwnText(query, keeps_answer=self._memory is not None)
            self._texts[query.seq_id] = text
        return text

    def _draft(self, text: "_OwnText", query: DraftQuery) -> Draft:
        """The likeliest token of any source, time after time, while the draft may be reached."""
        sources = self._sources(text, query)
        least = max(query.price, self._least_survival)
        token_ids: list[int] = []
        margins: list[float] = []
        survival = 1.0
        while len(token_ids) < query.num_wanted:
            guesses = [guess for source in sources if (guess := source.guess()) is not None]
            if not guesses:
                break
            guess = max(guesses, key=lambda guess: guess.margin)
            survival *= guess.chance
            if survival < least or guess.token_id < 0:
                break
            token_ids.append(guess.token_id)
            margins.append(guess.margin - MARGIN_ORIGIN)
            for source in sources:
                source.advance(guess.token_id)
        return Draft(tuple(token_ids), margins=tuple(margins), drafter=NAME)

    def _sources(self, text: "_OwnText", query: DraftQuery) -> list[Source]:
        """What is asked, the first wins of equals."""
        sources: list[Source] = [own_source(text.automaton)]
        if self._memory is not None:
            sources += self._memory.sources(query.cache_salt, query.token_ids)
        if self._table is not None:
            sources.append(TableSource(self._table, query.token_ids))
        return sources


class _OwnText:
    """One sequence's text as far as it was read; `answer` is what its tenant will remember.

    When the automaton is full a new one takes its place and reads the last quarter again.
    """

    def __init__(self, query: DraftQuery, *, keeps_answer: bool) -> None:
        self.automaton = SuffixAutomaton(half_life=HALF_LIFE)
        self.cache_salt = query.cache_salt
        self.answer: list[int] = []
        self._keeps_answer = keeps_answer
        self._answer_start = max(query.sampling.num_prompt_tokens - CONTEXT_OF_ANSWER, 0)
        self._num_read = 0
        self._last_token_id: int | None = None

    def is_start_of(self, token_ids: Sequence[int]) -> bool:
        """Whether what was read can be the start of `token_ids` (by length and last token)."""
        if self._num_read == 0:
            return True
        return (
            self._num_read <= len(token_ids)
            and token_ids[self._num_read - 1] == self._last_token_id
        )

    def num_unread(self, token_ids: Sequence[int]) -> int:
        """Tokens that are still to be read."""
        return len(token_ids) - self._num_read

    def read(self, token_ids: Sequence[int], at_most: int) -> int:
        """Take in the next tokens; returns how many."""
        if at_most and self.automaton.num_tokens >= MAX_INDEXED_TOKENS:
            self.automaton = SuffixAutomaton(half_life=HALF_LIFE)
            self._num_read -= MAX_INDEXED_TOKENS // 4
        new = token_ids[self._num_read : self._num_read + at_most]
        if new:
            self.automaton.extend(new)
            self._remember(new)
            self._num_read += len(new)
            self._last_token_id = new[-1]
        return len(new)

    def _remember(self, new: Sequence[int]) -> None:
        """Keep what belongs to the answer and is not kept already."""
        start = self._answer_start + len(self.answer) - self._num_read
        if self._keeps_answer and start < len(new):
            self.answer += new[start:]
