"""Drafts from draft workers: one call per worker and step, never one queued behind another.

    propose ──message──> worker            answered in time: drafts
       │                                   late: the engine goes on without; the worker is busy
       └─ cancelled at the deadline        until its answer comes, which then brings its client
                                           up to date and nothing else
A dead worker is dropped until membership brings a new one.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.drafters.exchange import ExchangeClient
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput

logger = logging.getLogger(__name__)

Answer = dict[int, Draft] | DrafterUnavailable


class _Worker:
    """One draft worker as the engine knows it; `call` is the exchange that is under way."""

    def __init__(self, worker_id: str, handle: ActorHandle, *, engine_id: str) -> None:
        self.worker_id = worker_id
        self.client = ExchangeClient(engine_id)
        self.call: asyncio.Task[Answer] | None = None
        self._handle = handle

    @property
    def busy(self) -> bool:
        """Whether an answer is outstanding."""
        return self.call is not None and not self.call.done()

    def ask(self, queries: Sequence[DraftQuery]) -> asyncio.Task[Answer]:
        """Start an exchange. Its task outlives whoever awaits it and never raises."""
        self.call = asyncio.create_task(self._exchange(self.client.message(queries)))
        return self.call

    async def _exchange(self, message: ExchangeInput) -> Answer:
        try:
            answer: ExchangeOutput = await self._handle.exchange.remote(message)
        except RayError as error:
            logger.warning("draft worker %s is gone: %s", self.worker_id, type(error).__name__)
            return DrafterUnavailable("died")
        return self.client.digest(answer)


class RemoteDrafter:
    """A model drafter whose model runs in draft workers.

    A sequence stays with the worker that holds its context while that worker lives.
    """

    def __init__(self, name: str, *, engine_id: str, context_limit: int) -> None:
        self._name = name
        self._engine_id = engine_id
        self._context_limit = context_limit
        self._workers: dict[str, _Worker] = {}
        self._dead: set[str] = set()  # told of by membership, and known to be gone
        self._assigned: dict[int, _Worker] = {}

    @property
    def name(self) -> str:
        """The draft model's name."""
        return self._name

    @property
    def context_limit(self) -> int | None:
        """The draft model's context."""
        return self._context_limit

    def set_workers(self, handles: Mapping[str, ActorHandle]) -> None:
        """Use these workers from now on, by worker id; those in use are kept as they are."""
        self._dead &= handles.keys()
        for worker_id in self._workers.keys() - handles.keys():
            self._drop(worker_id)
        for worker_id in handles.keys() - self._workers.keys() - self._dead:
            self._workers[worker_id] = _Worker(
                worker_id, handles[worker_id], engine_id=self._engine_id
            )

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Ask every worker for its sequences' drafts, all at once.

        Raises DrafterUnavailable when no worker gave anything: `none` there are, all are `busy`
        with an earlier step, or they `died`.
        """
        if not queries:
            return {}
        if not self._workers:
            raise DrafterUnavailable("none")
        calls: dict[asyncio.Task[Answer], _Worker] = {}
        for worker, asked in self._spread(queries).items():
            if not worker.busy:
                calls[worker.ask(asked)] = worker
        if not calls:
            raise DrafterUnavailable("busy")
        await asyncio.wait(calls)  # a cancelled wait leaves its tasks alone
        return self._gathered({worker: call.result() for call, worker in calls.items()})

    def release(self, seq_ids: Iterable[int]) -> None:
        """Tell the workers with the next exchange that these sequences ended."""
        for seq_id in seq_ids:
            worker = self._assigned.pop(seq_id, None)
            if worker is not None:
                worker.client.release((seq_id,))

    def _spread(self, queries: Sequence[DraftQuery]) -> dict[_Worker, list[DraftQuery]]:
        """Each query at the worker that knows its sequence; new ones where the fewest are."""
        held: dict[_Worker, int] = dict.fromkeys(self._workers.values(), 0)
        for worker in self._assigned.values():
            held[worker] += 1
        spread: dict[_Worker, list[DraftQuery]] = defaultdict(list)
        for query in queries:
            worker = self._assigned.get(query.seq_id) or min(held, key=held.__getitem__)
            if query.seq_id not in self._assigned:
                self._assigned[query.seq_id] = worker
                held[worker] += 1
            spread[worker].append(query)
        return spread

    def _gathered(self, answers: Mapping[_Worker, Answer]) -> dict[int, Draft]:
        drafts: dict[int, Draft] = {}
        failure: DrafterUnavailable | None = None
        for worker, answer in answers.items():
            match answer:
                case DrafterUnavailable():
                    failure = answer
                    self._dead.add(worker.worker_id)
                    self._drop(worker.worker_id)
                case _:
                    drafts.update(answer)
        if failure is not None and not drafts:
            raise failure
        return drafts

    def _drop(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._assigned = {
                seq_id: other for seq_id, other in self._assigned.items() if other is not worker
            }
