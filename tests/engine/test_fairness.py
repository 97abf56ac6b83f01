"""Tenants that wait share an engine by their weights, whatever they ask for."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from cluster.control.policy import FixedPolicy
from cluster.engine.deadlines import Deadlines
from cluster.engine.queue import WaitingQueue
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Sequence
from cluster.engine.shares import Shares
from cluster.request import DEADLINE_PASSED, FinishReason
from tests.fakes import FakeModel, SameDrafter
from tests.harness import (
    Recorder,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    running,
    series,
)

NUM_STEPS = 600


@dataclass(frozen=True)
class Offer:
    """What a tenant keeps waiting, and how its requests look."""

    weight: float
    backlog: int
    prompts: tuple[int, int] = (4, 12)
    answers: tuple[int, int] = (4, 12)


class World:
    """A scheduler whose target always answers one token a step, and tenants who want more."""

    def __init__(self, offers: Mapping[str, Offer], *, seed: int) -> None:
        self._offers = offers
        self._random = random.Random(seed)
        self._limits = make_limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
        self.scheduler = Scheduler(self._limits, draft_context_limit=None)
        self._num = 0
        self._ends: dict[Sequence, int] = {}
        self.rows: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()

    def step(self) -> None:
        """Everyone fills up its backlog, then the target computes a step."""
        waiting = Counter(sequence.request.tenant for sequence in self.scheduler.waiting)
        for tenant, offer in self._offers.items():
            for _ in range(offer.backlog - waiting[tenant]):
                self._submit(tenant, offer)
        plan = self.scheduler.schedule(FixedPolicy(0))
        for turn in plan.turns:
            sequence = turn.sequence
            tenant = sequence.request.tenant
            self.rows[tenant] += turn.num_rows
            samples = turn.samples
            sequence.num_computed_tokens += turn.num_rows
            if samples:
                sequence.token_ids.append(1)
            if len(sequence.token_ids) >= self._ends[sequence]:
                self.scheduler.remove(sequence)
                del self._ends[sequence]
            else:
                self.scheduler.settle(sequence)
        for sequence in plan.admitted:
            self.begun[sequence.request.tenant] += 1

    def _submit(self, tenant: str, offer: Offer) -> None:
        self._num += 1
        num_prompt = self._random.randint(*offer.prompts)
        request = replace(
            make_request([1] * num_prompt, max_tokens=None),
            request_id=str(self._num),
            tenant=tenant,
            weight=offer.weight,
            cache_salt=str(self._num),  # nothing is cached, so that all rows are computed
        )
        sequence = Sequence(
            request,
            seq_id=self._num,
            emit=lambda _: None,
            eos_token_ids=frozenset(),
            max_model_len=self._limits.max_model_len,
        )
        self._ends[sequence] = num_prompt + self._random.randint(*offer.answers)
        self.scheduler.add(sequence)


def shares(offers: Mapping[str, Offer], *, seed: int) -> dict[str, float]:
    """Each tenant's part of all rows, divided by its part of all weights."""
    world = World(offers, seed=seed)
    for _ in range(NUM_STEPS):
        world.step()
    rows, weights = world.rows.total(), sum(offer.weight for offer in offers.values())
    return {
        tenant: world.rows[tenant] / rows / (offer.weight / weights)
        for tenant, offer in offers.items()
    }


sizes = st.sampled_from([(2, 4), (4, 12), (10, 30)])


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1.0, 2.0, 3.0]),
    st.sampled_from([1.0, 2.0]),
    sizes,
    sizes,
    st.integers(0, 2**32),
)
def test_two_tenants_at_ten_to_one_share_by_weight(
    first_weight: float,
    second_weight: float,
    first: tuple[int, int],
    second: tuple[int, int],
    seed: int,
) -> None:
    """One offers ten times as much; both always wait; shares are within 10% of the weights."""
    offers = {
        "busy": Offer(weight=first_weight, backlog=40, prompts=first),
        "quiet": Offer(weight=second_weight, backlog=4, answers=second),
    }
    for share in shares(offers, seed=seed).values():
        assert 0.9 <= share <= 1.1


def test_ten_tenants_share_by_weight() -> None:
    """However different they are in size and in what they offer."""
    offers = {
        f"tenant {place}": Offer(weight=1.0 + place % 3, backlog=4 + 3 * place)
        for place in range(10)
    }
    for share in shares(offers, seed=3).values():
        assert 0.85 <= share <= 1.15


def test_who_is_alone_gets_everything() -> None:
    """Its weight matters beside others only: with any it has as many rows as the steps hold."""
    rows = []
    for weight in (0.01, 1.0, 100.0):
        world = World({"alone": Offer(weight=weight, backlog=8)}, seed=1)
        for _ in range(100):
            world.step()
        rows.append(world.rows.total())
    assert rows[0] == rows[1] == rows[2] > 4 * 100


def test_nobody_starves_for_a_small_weight() -> None:
    """A hundredth of the weight is about a hundredth of the rows, not none."""
    offers = {"large": Offer(weight=10.0, backlog=40), "small": Offer(weight=0.1, backlog=2)}
    world = World(offers, seed=2)
    for _ in range(4 * NUM_STEPS):
        world.step()
    assert world.begun["small"] >= 4


def queue_of(*tenants: str, shares: Shares) -> WaitingQueue:
    """A queue with one sequence of each, in this order of age."""
    queue = WaitingQueue(shares)
    for seq_id, tenant in enumerate(tenants, start=1):
        queue.push(_sequence(seq_id, tenant), 1)
    return queue


def _sequence(seq_id: int, tenant: str, *, deadline: float | None = None) -> Sequence:
    request = replace(make_request([1], max_tokens=100), tenant=tenant, deadline_seconds=deadline)
    return Sequence(
        request,
        seq_id=seq_id,
        emit=lambda _: None,
        eos_token_ids=frozenset(),
        max_model_len=256,
    )


def test_absence_is_no_credit_and_use_is_a_debt() -> None:
    """Who comes anew begins where the one is that was served last; who used more waits for it."""
    shares = Shares()
    for tenant in ("a", "b"):
        shares.begin_waiting(tenant, weight=1.0)
        shares.enter(tenant)
    shares.charge("a", 100)
    shares.charge("b", 60)
    shares.serve("b")
    shares.begin_waiting("c", weight=1.0)
    assert shares.service("c") == 60
    shares.leave("a")
    shares.begin_waiting("a", weight=1.0)
    assert shares.service("a") == 100


def test_accounts_are_kept_for_those_only_who_are_here_or_owe() -> None:
    """However many tenants there were, nothing is left of them when all have gone."""
    shares = Shares()
    for number in range(1000):
        tenant = f"tenant {number}"
        shares.begin_waiting(tenant, weight=1.0)
        shares.enter(tenant)
        shares.charge(tenant, number)
        shares.leave(tenant)
        assert len(shares) == 0


def test_the_longest_waiting_one_lifts_its_priority_for_all() -> None:
    """Waiting is for the priority as a whole: within it the weights decide all the same."""
    shares = Shares()
    queue = queue_of("many", "few", shares=shares)
    shares.charge("many", 50)
    for step_id in (1, 100_000):
        first = queue.first(step_id)
        assert first is not None
        assert first.request.tenant == "few"


def deadlines(step_seconds: float, clock: Callable[[], float]) -> Deadlines:
    """Of an engine whose steps take so long."""
    found = Deadlines(clock=clock)
    found.observe(step_seconds)
    return found


def test_urgency_is_the_tokens_a_step_that_are_needed() -> None:
    """Of 100 tokens in 200, 90, 40 and 20 steps; and none where no draft would help."""
    for num_steps, urgency in ((200, 1.0), (90, 2.0), (40, 4.0), (20, 4.0), (5, 1.0), (-1, 1.0)):
        sequence = _sequence(1, "a", deadline=num_steps * 0.1)
        assert deadlines(0.1, lambda: 0.0).urgency(sequence) == urgency
    assert deadlines(0.1, lambda: 0.0).urgency(_sequence(1, "a")) == 1.0


async def test_what_has_expired_never_runs_and_is_counted() -> None:
    """Neither in the queue nor after it has begun; the others go on as if it had not been."""
    limits = make_limits(max_num_seqs=1)
    registry = CollectorRegistry()
    drafter = SameDrafter(FakeModel(limits.vocab_size))
    engine = make_engine(make_fake_target(limits), drafter, limits=limits, registry=registry)
    now = 0.0
    engine._deadlines = Deadlines(clock=lambda: now)
    late = Recorder(replace(make_request([3, 4], request_id="late"), deadline_seconds=0.0))
    good = Recorder(make_request([5, 6], request_id="good"))
    engine.submit(good.request, good)
    engine.submit(late.request, late)
    now = float("inf")
    async with running(engine):
        await asyncio.gather(good.finished.wait(), late.finished.wait())
    [delta] = late.deltas
    assert (delta.finish_reason, delta.error) == (FinishReason.ABORT, DEADLINE_PASSED)
    assert good.answer().finish_reason is not FinishReason.ABORT
    counted = series(registry)
    assert counted["drafthouse_expired_requests_total{state=waiting}"] == 1
    assert counted["drafthouse_expired_requests_total{state=running}"] == 0
