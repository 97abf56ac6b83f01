"""How many replicas there should be, on virtual time: square waves, sines, and more."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cluster.control.damper import Damper, Limits
from cluster.control.demand import TargetLoad
from cluster.control.scaling import DraftingLoad, DraftScaler, GatewayScaler, TargetScaler
from cluster.messages import EngineLoad

LIMITS = Limits(
    min_replicas=1, max_replicas=10, upscale_delay_seconds=10.0, downscale_delay_seconds=60.0
)
CAPACITY = 100.0  # tokens a second of a target, at most
START_SECONDS = 15.0
MOST_DEPTH = 4.0
SETTLED = (Phase.explicit, Phase.reuse, Phase.generate)  # what is found here is not made smaller

Demand = Callable[[float], float]


def square(low: float, high: float, *, period: float = 1200.0) -> Demand:
    """Low for half of the period, then high."""
    return lambda now: high if now % period >= period / 2 else low


def sine(low: float, high: float, *, period: float = 1200.0) -> Demand:
    """From low to high and back, beginning low."""
    return lambda now: low + (high - low) * (1 - math.cos(2 * math.pi * now / period)) / 2


@dataclass
class Targets:
    """Timed fakes: targets that share a queue, guess less the more they have to do, take time."""

    scaler: TargetScaler
    wanted: int = 1
    starting: list[float] = field(default_factory=list)
    backlog: float = 0.0
    depth: float = MOST_DEPTH
    depths: list[tuple[float, float]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    late_seconds: float = 0.0  # in which requests waited longer than two seconds

    def play(self, demand: Demand, seconds: int) -> None:
        """A second at a time."""
        for now in range(seconds):
            self.second(float(now), demand(float(now)))

    def second(self, now: float, demand: float) -> None:
        """One second of that demand, then what the scaler makes of it."""
        self.starting = [at for at in self.starting if at > now]
        there = max(self.wanted - len(self.starting), 1)
        most = there * CAPACITY
        given = min(demand + self.backlog, most)
        self.backlog += demand - given
        self.late_seconds += self.backlog > 2 * most
        idle = 1 - given / most
        self.depth += 0.5 * (MOST_DEPTH * idle - self.depth)  # settles within seconds
        self.depths.append((now, self.depth))
        load = TargetLoad(
            tokens_per_second=given / there,
            waiting_tokens=self.backlog / there,
            capacity=CAPACITY,
            depth=self.depth,
        )
        wanted = self.scaler.desired([load] * there, current=self.wanted, now=now)
        if wanted != self.wanted:
            self.changes.append((now, wanted))
        if wanted > self.wanted:
            self.starting += [now + START_SECONDS] * (wanted - self.wanted)
        else:
            self.starting = self.starting[: max(len(self.starting) - self.wanted + wanted, 0)]
        self.wanted = wanted


def changes_between(changes: Sequence[tuple[float, int]], begin: float, end: float) -> int:
    """How many there were."""
    return sum(begin <= at < end for at, _ in changes)


@pytest.mark.parametrize(("low", "high"), [(50.0, 130.0), (50.0, 550.0), (210.0, 600.0)])
def test_x74_a_square_wave_takes_at_most_two_changes_an_edge(low: float, high: float) -> None:
    """Up, perhaps once more, and level until the next edge; then the queue is gone."""
    targets = Targets(TargetScaler(LIMITS))
    targets.play(square(low, high), 4800)
    edges = range(600, 4800, 600)
    assert all(1 <= changes_between(targets.changes, edge, edge + 600) <= 2 for edge in edges)
    assert targets.backlog == 0
    sizes = [wanted for _, wanted in targets.changes]
    assert max(sizes) * CAPACITY * 0.8 >= high
    assert max(sizes) <= math.ceil(high / (0.8 * CAPACITY)) + 1


def test_x74_a_sine_takes_at_most_two_changes_an_edge() -> None:
    """What grows slowly is anticipated; what falls is followed late."""
    targets = Targets(TargetScaler(LIMITS), wanted=2)
    targets.play(sine(110.0, 300.0), 6000)
    halves = range(1200, 6000, 600)
    counts = [changes_between(targets.changes, half, half + 600) for half in halves]
    assert all(count <= 2 for count in counts)
    assert sum(counts) >= 4  # it does follow
    assert targets.late_seconds == 0


def test_guessing_less_comes_before_another_replica() -> None:
    """At an edge the depth falls at once, and a replica comes only when it is low and level."""
    targets = Targets(TargetScaler(LIMITS))
    targets.play(square(20.0, 300.0), 1200)
    [first, *_] = [at for at, wanted in targets.changes if wanted > 1]
    fallen = next(at for at, depth in targets.depths if at >= 600 and depth < MOST_DEPTH / 4)
    assert 600 <= fallen < first


def loads(depth: float, *, rate: float = 95.0, waiting: float = 0.0) -> list[TargetLoad]:
    """One target that is nearly full."""
    load = TargetLoad(
        tokens_per_second=rate, waiting_tokens=waiting, capacity=CAPACITY, depth=depth
    )
    return [load]


def test_while_drafts_become_fewer_the_number_stays_but_not_for_ever() -> None:
    """A lever that never comes to rest is not waited for longer than a few windows."""
    scaler = TargetScaler(LIMITS)
    depths = (64.0 * 0.95**now for now in range(200))
    sizes = [scaler.desired(loads(depth), current=1, now=now) for now, depth in enumerate(depths)]
    grown_at = next(now for now, size in enumerate(sizes) if size > 1)
    assert 2 * LIMITS.upscale_delay_seconds < grown_at < 6 * LIMITS.upscale_delay_seconds


def test_drafts_that_become_fewer_hold_nothing_up_while_requests_wait_long() -> None:
    """Then it is plain that guessing less is not enough."""
    scaler = TargetScaler(LIMITS)
    for now in range(30):
        waiting = 300.0 + 10 * now
        load = loads(64.0 * 0.95**now, waiting=waiting)
        if scaler.desired(load, current=1, now=now) > 1:
            break
    assert now <= 2 * LIMITS.upscale_delay_seconds + 1


def test_drafts_that_stay_many_hold_nothing_up() -> None:
    """Where drafts are nearly free they never become few: then only replicas help."""
    scaler = TargetScaler(LIMITS)
    sizes = [scaler.desired(loads(MOST_DEPTH), current=1, now=now) for now in range(12)]
    assert max(sizes) > 1


def test_a_queue_brings_a_replica_though_the_rate_looks_low() -> None:
    """Prompts make few tokens: what counts then is how long requests wait."""
    scaler = TargetScaler(LIMITS, target_delay_seconds=1.0)
    sizes = [
        scaler.desired(loads(0.0, rate=30.0, waiting=500.0), current=1, now=now)
        for now in range(60)
    ]
    assert max(sizes) == 2


def test_capacity_is_what_is_seen_when_requests_wait() -> None:
    """A target that says 100 tokens a second and gives 50 with a queue needs company sooner."""
    scaler = TargetScaler(LIMITS)
    for now in range(120):
        scaler.desired(loads(0.0, rate=50.0, waiting=50.0), current=2, now=now)
    wanted = max(
        scaler.desired(loads(0.0, rate=60.0) * 2, current=2, now=now) for now in range(120, 160)
    )
    assert wanted > 2


def test_an_engines_load_in_the_words_of_scaling() -> None:
    """Drafts a sequence and step: each step gives a sequence one token that was no draft."""
    load = EngineLoad(
        running=4,
        waiting=3,
        free_blocks=0,
        step_id=1,
        max_num_seqs=4,
        base_seconds=0.01,
        row_seconds=0.0025,
        tokens_per_step=2.0,
        tokens_per_second=300.0,
        answer_tokens=50.0,
        drafted_per_second=400.0,
        accepted_per_second=200.0,
    )
    assert TargetLoad.of(load) == TargetLoad(
        tokens_per_second=300.0, waiting_tokens=150.0, capacity=400.0, depth=4.0
    )
    assert TargetLoad.of(EngineLoad(running=0, waiting=0, free_blocks=0, step_id=0)).depth == 0


@dataclass
class Drafts:
    """Draft workers that share the drafts of some sequences, in one pool."""

    scaler: DraftScaler
    wanted: int = 1
    changes: list[tuple[float, int]] = field(default_factory=list)

    def second(self, now: float, *, demand: float, acceptance: float) -> None:
        """`demand` sequences in two engines; a worker serves eight of them."""
        load = DraftingLoad(
            demand=demand,
            worth=20.0 * acceptance,
            sequences=max(8.0, demand / self.wanted),  # it holds more than it serves
            late_ratio=max(1 - 8 * self.wanted / demand, 0.0),
            target_tokens=20.0 * demand / 2,
        )
        wanted = self.scaler.desired([load] * self.wanted, current=self.wanted, now=now)
        if wanted != self.wanted:
            self.changes.append((now, wanted))
        self.wanted = wanted


def test_drafts_fall_to_the_fewest_when_none_is_accepted_and_come_back() -> None:
    """Twice there and back: at most two changes each time."""
    drafts = Drafts(DraftScaler(LIMITS))
    sizes = {}
    for now in range(2400):
        acceptance = 0.0 if now % 1200 >= 600 else 0.7
        drafts.second(float(now), demand=24.0, acceptance=acceptance)
        sizes[now] = drafts.wanted
    assert sizes[599] == sizes[1799] >= 3
    assert sizes[1199] == sizes[2399] == LIMITS.min_replicas
    for edge in range(0, 2400, 600):
        assert changes_between(drafts.changes, edge, edge + 600) <= 2


def test_another_draft_worker_comes_only_if_it_brings_what_it_costs() -> None:
    """Late drafts ask for more workers; whether they get them is a matter of their worth."""
    for cost_ratio, grows in ((0.05, True), (0.9, False)):
        drafts = Drafts(DraftScaler(LIMITS, cost_ratio=cost_ratio), wanted=2)
        for now in range(120):
            drafts.second(float(now), demand=32.0, acceptance=0.5)
        assert (drafts.wanted > 2) is grows


def test_gateways_follow_open_streams() -> None:
    """A gateway more for every so many streams, after a while; one less when they fit besides."""
    scaler = GatewayScaler(LIMITS, target_streams=100.0)
    wanted = 1
    history = []
    for now in range(400):
        streams = 350.0 if 50 <= now < 200 else 40.0
        wanted = scaler.desired([streams / wanted] * wanted, current=wanted, now=now)
        history.append(wanted)
    assert history[199] == 4
    assert history[-1] == 1
    assert sum(a != b for a, b in pairwise(history)) == 2


def test_nothing_is_decided_while_nobody_reports() -> None:
    """A cluster whose replicas are silent stays as it is."""
    targets, drafts, gateways = TargetScaler(LIMITS), DraftScaler(LIMITS), GatewayScaler(LIMITS)
    for now in range(300):
        assert targets.desired([], current=3, now=now) == 3
        assert drafts.desired([], current=3, now=now) == 3
        assert gateways.desired([], current=3, now=now) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 200)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_the_damper_keeps_within_its_limits_and_changes_seldom(
    phases: list[tuple[int, int]], least: int, more: int
) -> None:
    """Whatever is proposed: never outside, never up sooner than the delay, never down sooner."""
    limits = Limits(
        min_replicas=least,
        max_replicas=least + more,
        upscale_delay_seconds=5.0,
        downscale_delay_seconds=20.0,
    )
    damper = Damper(limits)
    current, now = least, 0.0
    proposals: list[int] = []
    for proposal, seconds in phases:
        for _ in range(seconds):
            proposals.append(max(least, min(least + more, proposal)))
            new = damper.settle(proposal, current=current, ready=current, now=now)
            assert least <= new <= least + more
            if new > current:
                assert min(proposals[-6:]) > current
            if new < current:
                assert len(proposals) >= 20
                assert max(proposals[-20:]) < current
            current, now = new, now + 1.0


@settings(max_examples=12, deadline=None, phases=SETTLED)
@given(st.floats(5, 790), st.floats(5, 790), st.integers(300, 500))
def test_x74_any_square_wave_settles(low: float, high: float, half: int) -> None:
    """At most two changes an edge whatever the heights are, and no queue at the end of either."""
    targets = Targets(TargetScaler(LIMITS))
    targets.play(square(low, high, period=2.0 * half), 4 * half)
    for edge in range(half, 4 * half, half):
        assert changes_between(targets.changes, edge, edge + half) <= 2
    assert targets.backlog <= CAPACITY
