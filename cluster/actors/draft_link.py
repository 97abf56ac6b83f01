"""One draft worker as an engine knows it: at most one exchange under way, and what it has earned.

in use ──out of the lease──> leaving: told that its sequences ended ──confirmed──> forgotten
   └────────died──────────────────────────────────────────────────────────────────────┘
"""

import asyncio
import logging
import pickle
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TypeGuard

from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.patience import Gain, Patience, StepLengths
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Resync

logger = logging.getLogger(__name__)

BUDGET = 0.5  # of the deadline: what the worker may spend on what it has not drafted ahead
FAREWELL_SECONDS = 10.0  # after which a worker that confirms nothing is left to itself

Answer = dict[int, Draft] | DrafterUnavailable


class DraftLink:
    """The way to one worker; `call` is the exchange that is under way."""

    def __init__(
        self,
        worker_id: str,
        handle: ActorHandle,
        *,
        client: ExchangeClient,
        steps: StepLengths | None,
        most_seconds: float,
    ) -> None:
        self.worker_id = worker_id
        self.client = client
        self.call: asyncio.Task[Answer] | None = None
        self.patience = Patience(most_seconds=most_seconds)
        self.gain = Gain()
        self.num_missed = 0  # steps in a row without anything from it
        self.died = False
        self._handle = handle
        self._steps = steps
        self._step = 0
        self._version = 0  # of the weights its last draft was drawn with

    @property
    def pays(self) -> float:
        """Seconds that a draft of its is expected to save."""
        step_seconds = None if self._steps is None else self._steps.seconds
        if self.gain.tokens is None or step_seconds is None:
            return inf
        return self.gain.tokens * step_seconds

    @property
    def deadline(self) -> float:
        """Seconds to wait for it."""
        return self.patience.deadline(self.pays)

    @property
    def is_busy(self) -> bool:
        """Whether it owes an answer."""
        return self.call is not None and not self.call.done()

    def may_ask(self, step: int) -> bool:
        """Whether nothing is outstanding, and it is time to ask."""
        self._step = step
        return not self.is_busy and self.patience.may_ask(step, pays=self.pays)

    def ask(self, queries: Sequence[DraftQuery]) -> asyncio.Task[Answer]:
        """Start an exchange. Its task outlives whoever awaits it and never raises."""
        self.patience.asked(self._step)
        message = self.client.message(queries, budget_seconds=BUDGET * self.deadline)
        lengths = {query.seq_id: len(query.token_ids) for query in queries}
        self.call = asyncio.create_task(self._exchange(message, lengths))
        return self.call

    def release(self, seq_id: int) -> None:
        """A sequence ended, or went to another worker."""
        self.client.release((seq_id,))
        self.gain.forget(seq_id)

    def tidy(self) -> None:
        """Name ended sequences to a worker that is asked for nothing, unless it owes an answer."""
        if self.client.num_unconfirmed and not self.is_busy and not self.died:
            self.call = asyncio.create_task(self._tell())

    async def leave(self, seq_ids: Iterable[int]) -> None:
        """Have it forget these sequences and all that ended, for it will not be asked again."""
        self.client.release(seq_ids)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                if self.call is not None:
                    await asyncio.wait([self.call])
                while self.client.num_unconfirmed and not self.died:
                    await self._tell()
        except TimeoutError:
            logger.warning("draft worker %s was left without an answer", self.worker_id)

    async def _tell(self) -> Answer:
        """An exchange that asks for nothing."""
        answer = await self._answer(self.client.message(()))
        if isinstance(answer, ExchangeOutput):
            self.client.digest(answer)
            return {}
        return answer

    async def _exchange(self, message: ExchangeInput, lengths: Mapping[int, int]) -> Answer:
        now = asyncio.get_running_loop().time
        begin = now()
        answer = await self._answer(message)
        if isinstance(answer, DrafterUnavailable):
            return answer
        drafts = self.client.digest(answer)
        for wanted in message.wanted:
            draft = drafts.get(wanted.seq_id, Draft())
            if draft.token_ids and draft.version != self._version:
                self._version = draft.version
                self.gain = Gain()  # what other weights brought says nothing of these
            self.gain.drafted(wanted.seq_id, lengths[wanted.seq_id], draft.token_ids)
        self.patience.answered(now() - begin, step=self._step, pays=self.pays)
        return drafts

    async def _answer(self, message: ExchangeInput) -> ExchangeOutput | DrafterUnavailable:
        """What the worker says, if it makes sense."""
        try:
            packed = await self._handle.exchange_packed.remote(pickle.dumps(message))
        except RayError as error:
            logger.warning("draft worker %s is gone: %s", self.worker_id, type(error).__name__)
            self.died = True
            return DrafterUnavailable("died")
        answer = _unpacked(packed)
        if not _is_sound(answer):
            logger.warning("draft worker %s answered %.200r", self.worker_id, answer)
            self.patience.failed(step=self._step)
            return DrafterUnavailable("garbled")
        return answer


def _unpacked(packed: bytes) -> object:
    """What a worker packed; None where that is nothing that can be unpacked."""
    try:
        return pickle.loads(packed)  # noqa: S301 - a worker's, by Ray
    except Exception:  # noqa: BLE001 - any can come of any bytes
        return None


def _is_sound(answer: object) -> TypeGuard[ExchangeOutput]:
    """Whether this is an answer at all; what is drafted in it is for the engine to judge."""
    return (
        isinstance(answer, ExchangeOutput)
        and isinstance(answer.drafts, dict)
        and all(_is_draft(draft) for draft in answer.drafts.values())
    )


def _is_draft(draft: object) -> bool:
    if isinstance(draft, Draft):
        parts = (draft.token_ids, draft.distributions, draft.margins)
        return all(isinstance(part, tuple) for part in parts)
    return isinstance(draft, Resync)
