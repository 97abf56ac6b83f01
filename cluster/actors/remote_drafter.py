"""Drafts from draft workers: one call per worker and step, never one queued behind another.

    propose ──message──> worker            answered in time: drafts
       │                                   late: the engine goes on without; the worker is busy
       └─ given up at its deadline         until its answer comes, which then brings its client
                                           up to date and nothing else
How long a worker is waited for, and whether at all, is what its answers have earned: see
`drafters.patience`. A dead worker is dropped until membership brings a new one.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ray.actor import ActorHandle

from cluster.actors.draft_link import Answer, DraftLink
from cluster.drafters.assignment import Assignment
from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.patience import StepLengths
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, Rule

MISSED = 8  # steps without anything, after which sequences are given to another worker
TIDY_SECONDS = 0.25  # after which a worker hears of ended sequences though it is asked for nothing


class RemoteDrafter:
    """A model drafter whose model runs in a pool of draft workers, shared with other engines.

    A sequence stays with the worker that holds its context while that worker is in use, and answers
    now and then; no sequence is at two. `rule` is how the engine verifies drafts; nobody is waited
    for longer than `most_seconds`, or, if it `weighs`, than the drafts of that worker are seen to
    save.
    """

    def __init__(
        self,
        name: str,
        *,
        engine_id: str,
        context_limit: int,
        rule: Rule = Rule.COUPLED,
        most_seconds: float = 1.0,
        weighs: bool = True,
    ) -> None:
        self._name = name
        self._rule = rule
        self._most_seconds = most_seconds
        self._weighs = weighs
        self._steps = StepLengths()
        self._step = 0
        self._step_begin: float | None = None
        self._engine_id = engine_id
        self._context_limit = context_limit
        self._workers: dict[str, DraftLink] = {}
        self._dead: set[str] = set()  # told of by membership, and known to be gone
        self._assignment = Assignment()
        self._leaving: set[asyncio.Task[None]] = set()
        self._tidying: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The draft model's name."""
        return self._name

    @property
    def context_limit(self) -> int | None:
        """The draft model's context."""
        return self._context_limit

    def set_workers(
        self,
        handles: Mapping[str, ActorHandle],
        *,
        num_sequences: Mapping[str, int] | None = None,
    ) -> None:
        """Use these workers from now on, by worker id; those in use are kept as they are.

        `num_sequences` are all that they said they hold, whatever engine's. Workers that are in use
        no longer are told to forget this engine's. Called in the engine's event loop.
        """
        self._dead &= handles.keys()
        for worker_id in self._workers.keys() - handles.keys():
            self._part_with(worker_id)
        for worker_id in handles.keys() - self._workers.keys() - self._dead:
            self._workers[worker_id] = DraftLink(
                worker_id,
                handles[worker_id],
                client=ExchangeClient(self._engine_id, rule=self._rule),
                steps=self._steps if self._weighs else None,
                most_seconds=self._most_seconds,
            )
        told = num_sequences or {}
        self._assignment.set_workers({name: told.get(name, 0) for name in self._workers})

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Ask every worker for its sequences' drafts, all at once, and wait while it pays.

        Raises DrafterUnavailable when no worker gave anything: `none` there are, all are `busy`
        with an earlier step, not to be waited for (`distrusted`), `late`, `garbled`, or `died`.
        """
        if not queries:
            return {}
        if not self._workers:
            raise DrafterUnavailable("none")
        now = asyncio.get_running_loop().time
        if self._step_begin is not None:
            self._steps.observe(now() - self._step_begin)
        try:
            return await self._asked(queries)
        finally:
            self._step_begin = now()

    async def _asked(self, queries: Sequence[DraftQuery]) -> dict[int, Draft]:
        self._step += 1
        if self._bury() and not self._workers:
            raise DrafterUnavailable("died")
        calls: dict[DraftLink, asyncio.Task[Answer]] = {}
        reason = "busy"
        for worker, asked in self._spread(queries).items():
            worker.gain.observe(asked)
            worker.num_missed += 1
            if not worker.may_ask(self._step):
                continue
            call = worker.ask(asked)
            if worker.patience.trusted:
                calls[worker] = call
            else:
                reason = "distrusted"
        if not calls:
            raise DrafterUnavailable(reason)
        try:
            await _until_done(calls)
        finally:
            for worker, call in calls.items():
                if not call.done():
                    worker.patience.failed(step=self._step)
        return self._gathered(calls)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Tell the workers that these sequences ended: with the next exchange, or soon without."""
        for seq_id in seq_ids:
            self._take_back(seq_id)
        self._tidy_soon()

    async def close(self) -> None:
        """Use no worker any more; return when each has confirmed it, or was given time to."""
        self.set_workers({})
        await asyncio.gather(*self._leaving)

    def _spread(self, queries: Sequence[DraftQuery]) -> dict[DraftLink, list[DraftQuery]]:
        """Each query at the worker that knows its sequence; new ones where the fewest are.

        Workers that are not trusted get new sequences only when all are like that, or when it is
        time to ask again, and those that have given nothing for a while lose theirs.
        """
        workers = self._workers
        open_to = [
            name
            for name, link in workers.items()
            if link.patience.trusted or link.may_ask(self._step)
        ] or [*workers]
        trusted = [name for name in open_to if workers[name].patience.trusted] or [*workers]
        spread: dict[DraftLink, list[DraftQuery]] = defaultdict(list)
        for query in queries:
            known = self._assignment.worker_of(query.seq_id)
            given_up = known is not None and workers[known].num_missed >= MISSED
            if given_up and known not in trusted:
                self._take_back(query.seq_id)
                self._tidy_soon()
            spread[workers[self._assignment.place(query.seq_id, open_to)]].append(query)
        return spread

    def _gathered(self, calls: Mapping[DraftLink, asyncio.Task[Answer]]) -> dict[int, Draft]:
        """The drafts that came in time. Raises DrafterUnavailable if there is no answer."""
        drafts: dict[int, Draft] = {}
        reasons: list[str] = []
        for worker, call in calls.items():
            match call.result() if call.done() else DrafterUnavailable("late"):
                case DrafterUnavailable(reason=reason):
                    reasons.append(reason)
                case answer:
                    worker.num_missed = 0
                    drafts.update(answer)
        self._bury()
        if reasons and not drafts:
            raise DrafterUnavailable(reasons[0])
        return drafts

    def _bury(self) -> bool:
        """Drop the workers that have died; returns whether there were any."""
        died = [worker_id for worker_id, worker in self._workers.items() if worker.died]
        for worker_id in died:
            self._dead.add(worker_id)
            self._assignment.leave(worker_id)
            del self._workers[worker_id]
        return bool(died)

    def _part_with(self, worker_id: str) -> None:
        """Use a worker no longer: it may live on, with contexts that nobody needs."""
        worker = self._workers.pop(worker_id)
        seq_ids = self._assignment.leave(worker_id)
        if not worker.died:
            farewell = asyncio.create_task(worker.leave(seq_ids))
            self._leaving.add(farewell)
            farewell.add_done_callback(self._leaving.discard)

    def _take_back(self, seq_id: int) -> None:
        worker_id = self._assignment.release(seq_id)
        if worker_id is not None:
            self._workers[worker_id].release(seq_id)

    def _tidy_soon(self) -> None:
        if self._tidying is None and any(
            worker.client.num_unconfirmed for worker in self._workers.values()
        ):
            loop = asyncio.get_running_loop()
            self._tidying = loop.call_later(TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        """Tell those of ended sequences whom no message has told since."""
        self._tidying = None
        for worker in self._workers.values():
            worker.tidy()
        self._tidy_soon()


async def _until_done(calls: Mapping[DraftLink, asyncio.Task[Answer]]) -> None:
    """Wait for every call, each up to its worker's deadline. A cancelled wait leaves them alone."""
    now = asyncio.get_running_loop().time
    begin = now()
    ends = {call: begin + worker.deadline for worker, call in calls.items()}
    while ends:
        await asyncio.wait(
            ends, timeout=max(min(ends.values()) - now(), 0), return_when=asyncio.FIRST_COMPLETED
        )
        ends = {call: end for call, end in ends.items() if not call.done() and end > now()}
