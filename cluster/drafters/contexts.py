"""The draft worker's side of the exchange: the contexts it follows, for any number of engines.

Pure bookkeeping, without a model: which tokens each sequence has committed, which of them the KV
memory of its slot was computed on, and who has to go when the slots are all taken.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.messages import DraftWanted, ExchangeInput

MAX_ENGINES = 256


@dataclass(slots=True)
class DraftContext:
    """One sequence as the draft worker knows it, and where its KV memory is.

    `token_ids` are committed. `computed_token_ids` are the tokens whose keys and values lie in
    the slot, position by position; drafts that came to nothing stay in it until `settle`.
    """

    slot: int
    token_ids: list[int] = field(default_factory=list)
    computed_token_ids: list[int] = field(default_factory=list)
    last_message: int = 0
    _num_settled: int = 0

    def commit(self, base_length: int, new_token_ids: Sequence[int]) -> None:
        """Make the context its first `base_length` tokens and then `new_token_ids`."""
        del self.token_ids[base_length:]
        self.token_ids.extend(new_token_ids)
        self._num_settled = min(self._num_settled, base_length)

    def settle(self) -> int:
        """Drop what was computed on other tokens than the committed; returns how much is left.

        At least the last committed token is left to compute, since what follows it is sampled
        from its row. Costs O(tokens since the last call), not O(context).
        """
        agreed = min(len(self.computed_token_ids), len(self.token_ids) - 1)
        settled = min(self._num_settled, agreed)
        while settled < agreed and self.computed_token_ids[settled] == self.token_ids[settled]:
            settled += 1
        del self.computed_token_ids[settled:]
        self._num_settled = settled
        return settled


class DraftContexts:
    """Contexts by engine and sequence, never more than `num_slots` of them.

    When the slots are taken the context that was asked for longest ago goes, provided no one of
    the last `patience` messages asked for it; otherwise the newcomer is turned away. Without
    patience two engines that together run more sequences than fit would evict each other's at
    every step, and nothing would be drafted but prompts.
    """

    def __init__(self, num_slots: int, *, patience: int = 32) -> None:
        self._patience = patience
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._contexts: OrderedDict[tuple[str, int], DraftContext] = OrderedDict()
        self._last_step: OrderedDict[str, int] = OrderedDict()
        self._num_messages = 0

    def __len__(self) -> int:
        return len(self._contexts)

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
        return {wanted.seq_id: self._take(message.engine_id, wanted) for wanted in message.wanted}

    def _remember_step(self, message: ExchangeInput) -> None:
        self._last_step[message.engine_id] = message.step_id
        self._last_step.move_to_end(message.engine_id)
        if len(self._last_step) > MAX_ENGINES:
            self._last_step.popitem(last=False)

    def _take(self, engine_id: str, wanted: DraftWanted) -> DraftContext | None:
        key = (engine_id, wanted.seq_id)
        context = self._contexts.get(key)
        if context is None and wanted.base_length == 0:
            context = self._admit(key)
        if context is None or wanted.base_length > len(context.token_ids):
            return None
        context.commit(wanted.base_length, wanted.new_token_ids)
        context.last_message = self._num_messages
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
