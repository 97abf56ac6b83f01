"""The drafters a ChoiceDrafter holds: free ones are asked at every step, paid ones where it pays.

paid, step by step    asked ── answer ──> graded, and asked where it is expected to pay
                        │
                        ├─ failed, late: rests 1, 2, 4, ... steps
                        └─ not asked for long: tried on the shortest context, until graded
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.drafters.grades import Grades
from cluster.engine.proposer import checked_margins, is_cancelled
from cluster.errors import DrafterUnavailable
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft

logger = logging.getLogger(__name__)

MAX_REST = 64  # steps that a failing drafter is left alone at a time
TRIAL_STEPS = 64  # steps without being asked after which a drafter is tried again; doubles
MAX_TRIAL_STEPS = 1024
MAX_EMPTY = 16  # answers without tokens in a row: as many as it takes to read a long context
FIRST_SAMPLES = 4
EMPTY_REST = 64  # steps that a sequence it has nothing for is not asked about then


class Member:
    """A drafter with its grades. Whatever it does, asking it fails nothing else."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.grades = Grades()
        self.failure: DrafterUnavailable | None = None  # of the last time it was asked

    async def ask(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Its drafts that have tokens, by sequence id; none when it fails."""
        before, self.failure = self.failure, None
        asked = [fitting for query in queries if (fitting := self._fitting(query)) is not None]
        error: BaseException | None = None
        try:
            return self._believed(asked, await self.drafter.propose(asked)) if asked else {}
        except DrafterUnavailable as unavailable:
            self.failure = unavailable
        except asyncio.CancelledError as cancelled:
            if is_cancelled():
                raise
            error = cancelled  # something inside the drafter was cancelled, not us
        except Exception as failed:  # noqa: BLE001 - drafts fail open: its bug is not the others'
            error = failed
        self.failure = self.failure or DrafterUnavailable("died")
        if before is None:
            name, reason = self.drafter.name, self.failure.reason
            logger.warning("drafter %s is left out: %s", name, reason, exc_info=error)
        return {}

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for seq_id in seq_ids:
            self.grades.forget(seq_id)
        try:
            self.drafter.release(seq_ids)
        except Exception:
            logger.exception("drafter %s failed", self.drafter.name)

    def _fitting(self, query: DraftQuery) -> DraftQuery | None:
        """The query as far as the drafter's context reaches, or None."""
        limit = self.drafter.context_limit
        if limit is None or len(query.token_ids) + query.num_wanted <= limit:
            return query
        num_wanted = limit - len(query.token_ids)
        return replace(query, num_wanted=num_wanted) if num_wanted > 0 else None

    def _believed(
        self, queries: Sequence[DraftQuery], answer: Mapping[int, Draft]
    ) -> dict[int, Draft]:
        """What can be graded: as long as wanted, with margins that are numbers, under its name."""
        drafts = {}
        for query in queries:
            draft = answer.get(query.seq_id)
            if draft is not None and draft.token_ids:
                drafts[query.seq_id] = replace(
                    draft,
                    token_ids=tuple(draft.token_ids),
                    margins=checked_margins(draft),
                    drafter=draft.drafter or self.drafter.name,
                ).first(query.num_wanted)
        return drafts


class PaidMember(Member):
    """A drafter that the step has to wait for."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        patience_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(drafter)
        self.seconds = Seconds()  # that a call takes
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._step = 0
        self._rest_until = 0
        self._rest = 1
        self._asked_at = -TRIAL_STEPS  # the last step with a draft
        self._trial_steps = TRIAL_STEPS
        self._num_empty: Counter[int] = Counter()
        self._not_before: dict[int, int] = {}

    def candidates(self, queries: Sequence[DraftQuery]) -> list[DraftQuery]:
        """Those it may be asked at this step. Call it once a step."""
        self._step += 1
        if self._step < self._rest_until:
            return []
        return [query for query in queries if self._step >= self._not_before.get(query.seq_id, 0)]

    def trial(self, candidates: Sequence[DraftQuery]) -> list[DraftQuery]:
        """One to ask although it is not expected to pay, when that is due.

        A trial goes on until the member has a draft; the next one is due after twice the time.
        """
        if self._step < self._asked_at + self._trial_steps:
            return []
        return sorted(candidates, key=lambda query: len(query.token_ids))[:1]

    async def ask(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """As above, and not waited for longer than its patience."""
        begin, before = self._clock(), self.failure
        try:
            async with asyncio.timeout(self._patience_seconds):
                answer = await super().ask(queries)
        except TimeoutError:
            self.failure, answer = DrafterUnavailable("late"), {}
            if before is None:
                logger.warning("drafter %s is late", self.drafter.name)
        self.seconds.observe(self._clock() - begin)
        if self.failure is not None:
            self._rest_until = self._step + 1 + self._rest
            self._rest = min(2 * self._rest, MAX_REST)
            return {}
        self._rest = 1
        for query in queries:
            self._note(query.seq_id, came=query.seq_id in answer)
        if answer:
            is_trial = self._step >= self._asked_at + self._trial_steps
            self._trial_steps = (
                min(2 * self._trial_steps, MAX_TRIAL_STEPS) if is_trial else TRIAL_STEPS
            )
            self._asked_at = self._step
        return answer

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        seq_ids = tuple(seq_ids)
        super().release(seq_ids)
        for seq_id in seq_ids:
            self._num_empty.pop(seq_id, None)
            self._not_before.pop(seq_id, None)

    def _note(self, seq_id: int, *, came: bool) -> None:
        """Leave a sequence alone that it has had nothing for, time after time."""
        if came:
            self._num_empty.pop(seq_id, None)
            return
        self._num_empty[seq_id] += 1
        if self._num_empty[seq_id] >= MAX_EMPTY:
            self._not_before[seq_id] = self._step + EMPTY_REST


class Seconds:
    """A duration, learned from samples.

    The first few are all that take in contexts and warm up, so the least of them counts. Later
    a shorter one counts for more than a longer one: what is believed too long is not asked again.
    """

    def __init__(self) -> None:
        self._num_samples = 0
        self._mean = math.inf

    @property
    def known(self) -> float:
        """The estimate; 0 until there is one."""
        return self._mean if self._num_samples >= FIRST_SAMPLES else 0.0

    def observe(self, seconds: float) -> None:
        """Move towards a sample; one out of all proportion counts for little."""
        self._num_samples += 1
        if self._num_samples <= FIRST_SAMPLES or seconds < self._mean / 2:
            self._mean = min(seconds, self._mean)
        else:
            self._mean += (min(seconds, 3 * self._mean) - self._mean) / 8
