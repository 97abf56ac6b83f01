"""Self-speculation (SWIFT, arXiv:2410.06916): the target without some of its parts drafts for it.

It has no weights and no memory of its own. The parts it keeps attend to the keys and values that
the target computed, and put those of drafted tokens after them, where the target's next step writes
its own before it reads any:

    positions          0 . . . . . . . n-1   n   n+1 ...
    the target's       -------------->|
    drafting writes                    last  d0  d1        then the step: last, d0, d1, d2

So it may only compute between the plan of a step and that step, in the target's thread, on blocks
that the plan holds for the sequence.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.drafters.survival import Survival
from cluster.drafters.thread import Thread
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, DraftDistribution, Rule, SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.sampling.propose import propose


@dataclass(slots=True)
class _Drafted:
    """A sequence while it is drafted for: its last token, and what is drawn to follow it."""

    seq_id: int
    block_table: tuple[int, ...]
    length: int
    last_token_id: int
    num_wanted: int
    sampling: SamplingSpec
    price: float
    history: list[int]
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    ended: bool = False  # nothing can be drawn any more

    @property
    def position(self) -> int:
        """Of the token that comes next."""
        return self.length + len(self.token_ids)

    def draft(self, name: str) -> Draft:
        """As the engine takes it."""
        return Draft(tuple(self.token_ids), tuple(self.distributions), tuple(self.margins), name)


class SkipDrafter:
    """`decoder` is the target's without some parts, `cache` the target's own.

    A sequence has drafts once all its tokens but the last are computed; until then, and in the step
    that copies a cached prefix for it, it has none. `rule` is how the engine verifies drafts.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        thread: Thread,
        name: str,
        rule: Rule = Rule.COUPLED,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._thread = thread
        self._name = name
        self._rule = rule
        self._survival = Survival()
        self._drafts: dict[int, tuple[int, Draft]] = {}  # with the length they follow

    @property
    def name(self) -> str:
        """As configured."""
        return self._name

    @property
    def context_limit(self) -> int | None:
        """None: it goes as far as the target does."""
        return None

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Drafts by sequence id. Raises what the thread raises once it is closed."""
        for query in queries:
            self._grade(query)
        sequences = [drafted for query in queries if (drafted := _begun(query)) is not None]
        if not sequences:
            return {}
        await asyncio.wrap_future(self._thread.submit(lambda: self._compute(sequences)))
        drafts = {each.seq_id: each.draft(self._name) for each in sequences}
        self._drafts |= {each.seq_id: (each.length, drafts[each.seq_id]) for each in sequences}
        return drafts

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for seq_id in seq_ids:
            self._drafts.pop(seq_id, None)

    def _grade(self, query: DraftQuery) -> None:
        """Learn from what followed how likely drafts are kept."""
        length, draft = self._drafts.pop(query.seq_id, (0, Draft()))
        followed = query.token_ids[length : length + len(draft.token_ids)]
        right = [a == b for a, b in zip(followed, draft.token_ids, strict=False)]
        num_right = right.index(False) if False in right else len(right)
        self._survival.observe(draft.margins, num_right, len(right))

    @torch.inference_mode()
    def _compute(self, sequences: Sequence[_Drafted]) -> None:
        """Lengthen all drafts by one token in each pass."""
        growing = [each for each in sequences if each.num_wanted]
        while growing:
            rows = [
                each.token_ids[-1] if each.token_ids else each.last_token_id for each in growing
            ]
            hidden = self._decoder.forward(
                torch.tensor(rows, dtype=torch.int64, device=self._decoder.device),
                [Segment(each.block_table, each.position - 1, 1) for each in growing],
                self._cache,
            )
            self._draw(growing, self._decoder.logits(hidden))
            growing = [each for each in growing if self._may_grow(each)]

    def _draw(self, sequences: Sequence[_Drafted], logits: Tensor) -> None:
        drawn = propose(
            logits,
            [each.sampling for each in sequences],
            [each.position for each in sequences],
            histories=[
                [*each.history, *each.token_ids] if each.history else [] for each in sequences
            ],
            rule=self._rule,
        )
        for each, draft in zip(sequences, drawn, strict=True):
            if draft is None:
                each.ended = True
                continue
            each.token_ids.append(draft.token_id)
            each.margins.append(draft.margin)
            if draft.distribution is not None:
                each.distributions.append(draft.distribution)

    def _may_grow(self, drafted: _Drafted) -> bool:
        """Whether another token can and should be drawn."""
        if drafted.ended or len(drafted.token_ids) >= drafted.num_wanted:
            return False
        worth = self._survival.num_worth(drafted.margins, drafted.price)
        return worth == len(drafted.margins)


def _begun(query: DraftQuery) -> _Drafted | None:
    """What the query's list of tokens says now, or None when the target is not that far."""
    length, memory = len(query.token_ids), query.memory
    if memory is None or memory.num_computed != length - 1:
        return None
    return _Drafted(
        seq_id=query.seq_id,
        block_table=memory.block_table,
        length=length,
        last_token_id=query.token_ids[-1],
        num_wanted=query.num_wanted,
        sampling=query.sampling,
        price=query.price,
        history=list(query.token_ids) if query.sampling.needs_history else [],
    )
