"""The draft worker's side of the exchange: the contexts it follows, for any number of engines.

Pure bookkeeping, without a model: which tokens each sequence has committed, what is drafted to
follow them, how much of both the KV memory of its slot was computed on, and who has to go when the
slots are all taken.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.drafters.survival import Survival
from cluster.drafters.versions import VersionTally
from cluster.messages import (
    Draft,
    DraftDistribution,
    DraftWanted,
    ExchangeInput,
    Rule,
    SamplingSpec,
)

MAX_ENGINES = 256
STALE_SECONDS = 60.0  # after which a context that nobody asks for has been forgotten by its engine
UNKNOWN = SamplingSpec(seed=0)  # until the first message


@dataclass(frozen=True, slots=True)
class TailToken:
    """A drafted token and what is known of it: see `messages.Draft`."""

    token_id: int
    margin: float
    distribution: DraftDistribution | None = None


@dataclass(frozen=True, slots=True)
class Grade:
    """What a commit said of the tail that was there: `num_right` of `num_known` tokens."""

    margins: tuple[float, ...]
    num_right: int
    num_known: int


@dataclass(slots=True)
class DraftContext:
    """One sequence as the draft worker knows it, and where its KV memory is.

        token_ids   c c c c c c          committed
        tail                    t t t    drafted to follow them, by `sampling` and `rule`
        num_computed  ------------->     of both, as keys and values in the slot

    At least the last token is never computed: what follows it is drawn from its row.
    """

    slot: int
    token_ids: list[int] = field(default_factory=list)
    tail: list[TailToken] = field(default_factory=list)
    num_computed: int = 0
    num_wanted: int = 0
    price: float = 0.0
    sampling: SamplingSpec = UNKNOWN
    rule: Rule = Rule.COUPLED
    ended: bool = False  # nothing can be drawn after the tail
    last_message: int = 0
    asked_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Committed and drafted."""
        return len(self.token_ids) + len(self.tail)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have to be computed before the tail grows; at least 1."""
        return self.num_tokens - self.num_computed

    @property
    def margins(self) -> tuple[float, ...]:
        """Of the tail's tokens."""
        return tuple(drawn.margin for drawn in self.tail)

    @property
    def history(self) -> list[int]:
        """All tokens before the next one, if its distribution asks for them."""
        if not self.sampling.needs_history:
            return []
        return [*self.token_ids, *(drawn.token_id for drawn in self.tail)]

    def next_rows(self, at_most: int) -> list[int]:
        """The first uncomputed tokens."""
        start, length = self.num_computed, len(self.token_ids)
        rows = self.token_ids[start : start + at_most]
        if start + at_most > length:
            first = max(start - length, 0)
            drawn = self.tail[first : first + at_most - len(rows)]
            rows += [token.token_id for token in drawn]
        return rows

    def commit(self, base_length: int, new_token_ids: Sequence[int]) -> Grade:
        """Make the context its first `base_length` tokens and then `new_token_ids`.

        What the old text, tail included, has in common with the new one stays, with its keys and
        values. Costs O(new tokens), not O(context).
        """
        num_committed = len(self.token_ids)
        replaced = self.token_ids[base_length:] + [drawn.token_id for drawn in self.tail]
        num_agreed = _num_common(replaced, new_token_ids)
        agreed_length = base_length + num_agreed
        length = base_length + len(new_token_ids)
        grade = Grade(
            self.margins,
            num_right=max(agreed_length - num_committed, 0),
            num_known=min(length - num_committed, len(self.tail))
            if agreed_length >= num_committed
            else 0,
        )
        self.token_ids[base_length:] = new_token_ids
        if agreed_length == length >= num_committed:
            del self.tail[: length - num_committed]
        else:
            self.drop_tail()
            self.num_computed = min(self.num_computed, agreed_length)
            self._leave_a_row()
        return grade

    def follow(self, sampling: SamplingSpec, rule: Rule) -> None:
        """Draft in this way from now on; a tail that was drafted in another is no use."""
        if sampling != self.sampling or rule is not self.rule:
            self.sampling, self.rule = sampling, rule
            self.drop_tail()
            self._leave_a_row()

    def computed(self, num_rows: int) -> None:
        """So many more tokens are in the slot; the last one's row is used up by `append`."""
        self.num_computed = min(self.num_computed + num_rows, self.num_tokens - 1)

    def append(self, drawn: TailToken) -> None:
        """Lengthen the tail by what was drawn from the last token's row."""
        self.num_computed = self.num_tokens
        self.tail.append(drawn)

    def draft(self, num_tokens: int, *, drafter: str, version: int = 0) -> Draft:
        """The first tokens of the tail."""
        drawn = self.tail[:num_tokens]
        distributions = tuple(each.distribution for each in drawn if each.distribution is not None)
        return Draft(
            tuple(each.token_id for each in drawn),
            distributions,
            tuple(each.margin for each in drawn),
            drafter,
            version,
        )

    def start_over(self) -> None:
        """Keep the committed tokens, and nothing that was computed of them."""
        self.drop_tail()
        self.num_computed = 0

    def drop_tail(self) -> None:
        """Go back to the committed tokens."""
        self.tail.clear()
        self.ended = False

    def _leave_a_row(self) -> None:
        self.num_computed = max(min(self.num_computed, self.num_tokens - 1), 0)


class DraftContexts:
    """Contexts by engine and sequence, never more than `num_slots` of them.

    When the slots are taken the context that was asked for longest ago goes, provided no one of
    the last `patience` messages asked for it; otherwise the newcomer is turned away. Without
    patience two engines that together run more sequences than fit would evict each other's at
    every step, and nothing would be drafted but prompts.

    An engine that dies leaves its contexts behind: `drop_stale` forgets them. `clock` gives seconds
    that never go back.

    `survival` learns from what every message says of the tails that were there, and `tally` counts
    it for the version of the weights that drafted them.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        patience: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.survival = Survival()
        self.tally = VersionTally()
        self._patience = patience
        self._clock = clock
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._contexts: OrderedDict[tuple[str, int], DraftContext] = OrderedDict()
        self._last_step: OrderedDict[str, int] = OrderedDict()
        self._num_messages = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[DraftContext]:
        return iter(self._contexts.values())

    @property
    def num_free_slots(self) -> int:
        """Slots no context holds."""
        return len(self._free_slots)

    def receive(self, message: ExchangeInput) -> dict[int, DraftContext | None]:
        """Bring the contexts up to a message; None where the whole context has to be sent.

        A message that arrives twice is taken twice, to the same effect. One that was overtaken by
        a later one of its engine is answered with None throughout and changes nothing.
        """
        if message.step_id < self._last_step.get(message.engine_id, 0):
            return dict.fromkeys((wanted.seq_id for wanted in message.wanted), None)
        self._remember_step(message)
        self._num_messages += bool(message.wanted)
        for seq_id in message.finished:
            self._drop((message.engine_id, seq_id))
        return {wanted.seq_id: self._take(message, wanted) for wanted in message.wanted}

    def drop_stale(self) -> None:
        """Forget what nobody has asked for in STALE_SECONDS; whoever does sends it whole again."""
        oldest = self._clock() - STALE_SECONDS
        while self._contexts:
            key, context = next(iter(self._contexts.items()))
            if context.asked_at > oldest:
                return
            self._drop(key)

    def start_over(self, version: int) -> None:
        """Other weights draft from now on: what these computed and drafted is of no use to them."""
        self.survival = Survival()
        self.tally.begin(version)
        for context in self:
            context.start_over()

    def _remember_step(self, message: ExchangeInput) -> None:
        self._last_step[message.engine_id] = message.step_id
        self._last_step.move_to_end(message.engine_id)
        if len(self._last_step) > MAX_ENGINES:
            self._last_step.popitem(last=False)

    def _take(self, message: ExchangeInput, wanted: DraftWanted) -> DraftContext | None:
        key = (message.engine_id, wanted.seq_id)
        context = self._contexts.get(key)
        if context is None and wanted.base_length == 0:
            context = self._admit(key)
        if context is None or wanted.base_length > len(context.token_ids):
            return None
        grade = context.commit(wanted.base_length, wanted.new_token_ids)
        self.survival.observe(grade.margins, grade.num_right, grade.num_known)
        self.tally.observe(num_right=grade.num_right, num_known=grade.num_known)
        context.follow(wanted.sampling, message.rule)
        context.num_wanted, context.price = wanted.num_wanted, message.price
        context.last_message = self._num_messages
        context.asked_at = self._clock()
        self._contexts.move_to_end(key)
        return context

    def _admit(self, key: tuple[str, int]) -> DraftContext | None:
        if not self._free_slots:
            self._evict_stale()
        if not self._free_slots:
            return None
        context = DraftContext(self._free_slots.pop())
        self._contexts[key] = context
        return context

    def _evict_stale(self) -> None:
        """Drop the context asked for longest ago, unless that was within `patience` messages."""
        key, oldest = next(iter(self._contexts.items()))
        if self._num_messages - oldest.last_message > self._patience:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        context = self._contexts.pop(key, None)
        if context is not None:
            self._free_slots.append(context.slot)


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
