"""The engine's side of the exchange with a draft worker: what to send, and what came back.

One message a step goes to the worker and at most one answer comes back:

    step 7   wanted: seq 3 (base 0, 41 tokens), seq 4 (base 60, 2 tokens)   finished: 1
             answer: 3 -> Draft, 4 -> Resync
    step 8   wanted: seq 3 (base 41, 3 tokens), seq 4 (base 0, 65 tokens)

Nothing has to arrive. What a worker is known to hold only changes on an answer to the message
that is outstanding, so a lost, late, repeated or reordered answer leaves the next message true.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from uuid import uuid4

from cluster.interfaces import DraftQuery
from cluster.messages import Draft, DraftWanted, ExchangeInput, ExchangeOutput, Resync, Rule

REFUSAL_MESSAGES = 16


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """A message that no answer has settled: the lengths it brings sequences to, whom it buries."""

    step_id: int
    lengths: dict[int, int]
    whole: frozenset[int]
    finished: frozenset[int]


class ExchangeClient:
    """What one engine knows of one draft worker.

    Step ids count from 1 for each client, so each makes a name of its own of `engine_id`: an engine
    that comes back to a worker it knew with a new client is not taken for its former self.

    A sequence whose whole context is answered with Resync found the worker full. It is left out
    of the next `refusal_messages` messages, so that a full worker is not sent it at every step.
    `rule` is how the drafts will be verified.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        rule: Rule = Rule.COUPLED,
        refusal_messages: int = REFUSAL_MESSAGES,
    ) -> None:
        self._engine_id = f"{engine_id}/{uuid4().hex[:12]}"
        self._rule = rule
        self._refusal_messages = refusal_messages
        self._step_id = 0
        self._held: dict[int, int] = {}  # committed tokens the worker has acknowledged
        self._sent: set[int] = set()  # the worker may hold something of these
        self._finished: set[int] = set()  # ended, and the worker has not confirmed it yet
        self._refused_until: dict[int, int] = {}  # step id from which to ask again
        self._outstanding: _Outstanding | None = None

    @property
    def num_unconfirmed(self) -> int:
        """Ended sequences the worker may still hold; an empty message would tell it."""
        return len(self._finished)

    @property
    def num_followed(self) -> int:
        """Sequences this side keeps anything about."""
        return len(self._sent | self._finished | self._held.keys() | self._refused_until.keys())

    def message(
        self, queries: Sequence[DraftQuery], *, budget_seconds: float = inf
    ) -> ExchangeInput:
        """The next message, which becomes the outstanding one. `queries` may be empty.

        Tails are as long as the lowest of the queries' prices has them.
        """
        self._step_id += 1
        asked = [query for query in queries if self._may_ask(query)]
        wanted = tuple(self._wanted(query) for query in asked)
        self._finished.difference_update(query.seq_id for query in asked)
        self._sent.update(query.seq_id for query in asked)
        self._outstanding = _Outstanding(
            step_id=self._step_id,
            lengths={query.seq_id: len(query.token_ids) for query in asked},
            whole=frozenset(part.seq_id for part in wanted if part.base_length == 0),
            finished=frozenset(self._finished),
        )
        return ExchangeInput(
            engine_id=self._engine_id,
            step_id=self._step_id,
            wanted=wanted,
            finished=tuple(sorted(self._finished)),
            rule=self._rule,
            price=min((query.price for query in queries), default=0.0),
            budget_seconds=budget_seconds,
        )

    def digest(self, answer: ExchangeOutput) -> dict[int, Draft]:
        """Take an answer in; returns the drafts of sequences that still run.

        An answer to any other message than the outstanding one changes nothing and brings nothing.
        """
        outstanding = self._outstanding
        if outstanding is None or answer.step_id != outstanding.step_id:
            return {}
        self._outstanding = None
        self._finished -= outstanding.finished
        drafts: dict[int, Draft] = {}
        for seq_id, length in outstanding.lengths.items():
            match answer.drafts.get(seq_id):
                case Draft() as draft:
                    self._held[seq_id] = length
                    drafts[seq_id] = draft
                case Resync():
                    self._held.pop(seq_id, None)
                    if seq_id in outstanding.whole:
                        self._refused_until[seq_id] = self._step_id + 1 + self._refusal_messages
                case None:
                    pass
        return drafts

    def release(self, seq_ids: Iterable[int]) -> None:
        """Sequences ended: the worker is told with the next messages until it confirms."""
        for seq_id in seq_ids:
            self._held.pop(seq_id, None)
            self._refused_until.pop(seq_id, None)
            if self._outstanding is not None:
                self._outstanding.lengths.pop(seq_id, None)
            if seq_id in self._sent:
                self._sent.discard(seq_id)
                self._finished.add(seq_id)

    def forget_all(self) -> None:
        """The worker was replaced: the new one holds nothing, and owes no answer."""
        self._held.clear()
        self._sent.clear()
        self._finished.clear()
        self._refused_until.clear()
        self._outstanding = None

    def _may_ask(self, query: DraftQuery) -> bool:
        if query.num_wanted < 1:
            return False
        if self._step_id < self._refused_until.get(query.seq_id, 0):
            return False
        self._refused_until.pop(query.seq_id, None)
        return True

    def _wanted(self, query: DraftQuery) -> DraftWanted:
        base_length = self._held.get(query.seq_id, 0)
        if base_length > len(query.token_ids):  # another sequence under an old name
            base_length = 0
        return DraftWanted(
            seq_id=query.seq_id,
            base_length=base_length,
            new_token_ids=tuple(query.token_ids[base_length:]),
            num_wanted=query.num_wanted,
            sampling=query.sampling,
        )
