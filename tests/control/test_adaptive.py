"""The adaptive policy: it asks where it pays, stops where it does not, and can say why."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from cluster.control.adaptive import AdaptivePolicy
from cluster.control.cost import CostTable
from cluster.control.metrics import PolicyMetrics
from cluster.control.outlook import weight_of
from cluster.control.policy import Candidate, Outcome, StepRecord, StepShape
from cluster.messages import Draft
from tests.harness import series

CAP = 8


class Clock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def shape(num_sequences: int) -> StepShape:
    """All of them decode."""
    return StepShape(
        num_sequences=num_sequences,
        num_rows=num_sequences,
        num_context_tokens=100 * num_sequences,
    )


def cost(fixed: float, per_row: float) -> CostTable:
    """A straight line."""
    return CostTable(
        {
            StepShape(num_sequences=1, num_rows=rows, num_context_tokens=100): fixed
            + per_row * rows
            for rows in (1, 64, 640)
        }
    )


MEMORY_BOUND = (0.02, 1e-5)
COMPUTE_BOUND = (0.002, 1e-3)


class Play:
    """A policy in steps of some sequences, drafts of which are kept with given chances."""

    def __init__(
        self,
        line: tuple[float, float],
        *,
        registry: CollectorRegistry | None = None,
        trims: bool = True,
    ) -> None:
        self.line = line
        self.clock = Clock()
        self.policy = AdaptivePolicy(
            cost(*line),
            num_speculative_tokens=CAP,
            trims=trims,
            clock=self.clock,
            metrics=PolicyMetrics(registry or CollectorRegistry(), model="fake"),
        )
        self.lengths: dict[int, int] = {}
        self.num_asked: list[int] = []
        self.num_verified: list[int] = []
        self.chances = random.Random(0)

    def step(
        self,
        seq_ids: Sequence[int],
        chance: float | Callable[[int], float],
        *,
        drafting_seconds: float = 0.0,
        priorities: Mapping[int, int] | None = None,
        max_drafts: int | None = None,
        margin: float = 1.0,
    ) -> Mapping[int, int]:
        """One step; returns how many drafts of each were verified."""
        chance_of = chance if callable(chance) else lambda _: chance
        here = shape(len(seq_ids))
        asked = self.policy.choose(
            [
                Candidate(
                    seq_id=seq_id,
                    num_tokens=self.lengths.setdefault(seq_id, 50),
                    max_drafts=max_drafts,
                    priority=(priorities or {}).get(seq_id, 0),
                )
                for seq_id in seq_ids
            ],
            here,
        )
        waited = drafting_seconds if asked else 0.0
        self.clock.now += waited
        drafts = {
            seq_id: Draft((1,) * count, margins=(margin,) * count, drafter="fake")
            for seq_id, count in asked.items()
        }
        admitted = self.policy.admit(drafts, here) if self.policy_trims else None
        counts = {s: c if admitted is None else admitted.get(s, 0) for s, c in asked.items()}
        outcomes = []
        for seq_id in seq_ids:
            count, accepted = counts.get(seq_id, 0), 0
            while accepted < count and self.chances.random() < chance_of(seq_id):
                accepted += 1
            draft = drafts.get(seq_id, Draft()).first(count)
            outcomes.append(Outcome(seq_id=seq_id, draft=draft, num_accepted=accepted))
            self.lengths[seq_id] += accepted + 1
        fixed, per_row = self.line
        seconds = fixed + per_row * (len(seq_ids) + sum(counts.values()))
        self.clock.now += seconds
        self.policy.observe(
            StepRecord(
                shape=here,
                outcomes=tuple(outcomes),
                draft_seconds=waited,
                target_seconds=seconds,
            )
        )
        self.num_asked.append(sum(asked.values()))
        self.num_verified.append(sum(counts.values()))
        return counts

    @property
    def policy_trims(self) -> bool:
        """Whether the policy is asked what to admit."""
        return self.policy._trims


def test_where_rows_are_free_whole_drafts_are_verified() -> None:
    """Memory-bound, and most drafts are kept: the cap, of every sequence."""
    play = Play(MEMORY_BOUND)
    for _ in range(50):
        counts = play.step(range(4), 0.9)
    assert counts == dict.fromkeys(range(4), CAP)


def test_where_rows_are_dear_bad_drafts_are_not_asked_for() -> None:
    """Compute-bound, and few are kept: after 100 steps only probes are left."""
    play = Play(COMPUTE_BOUND)
    for _ in range(300):
        play.step(range(8), 0.3)
    assert sum(count > 0 for count in play.num_asked[100:]) < 0.2 * 200
    assert sum(play.num_verified[100:]) < 0.02 * 8 * 200


def test_each_sequence_has_its_own_depth() -> None:
    """The good drafts of a batch go deep, the bad ones are hardly verified."""
    play = Play((0.02, 0.5e-3))
    for _ in range(150):
        counts = play.step(range(8), lambda seq_id: 0.95 if seq_id < 4 else 0.1)
    assert min(counts.get(seq_id, 0) for seq_id in range(4)) >= 5
    assert max(counts.get(seq_id, 0) for seq_id in range(4, 8)) <= 1


def test_x16_a_random_drafter_is_given_up_and_a_metric_says_so() -> None:
    """1,000 tokens: K goes to 0, the reason is acceptance, and it cost under 5% of the time."""
    registry = CollectorRegistry()
    play = Play((0.02, 1e-3), registry=registry)
    for _ in range(1000):
        play.step([0], 0.001, drafting_seconds=2e-4)
    assert sum(play.num_asked[500:]) < 200
    values = series(registry)
    assert values["drafthouse_policy_regime{state=acceptance}"] == 1
    assert values["drafthouse_policy_regime{state=drafting}"] == 0
    assert values["drafthouse_policy_changes_total{to=plain,reason=acceptance}"] >= 1
    plain = 1000 * (play.line[0] + play.line[1])
    assert play.clock.now - 100.0 < plain / 0.95


def test_what_never_pays_costs_no_more_than_two_percent() -> None:
    """Also where every row is as dear as a plain step's, and in the long run."""
    play = Play(COMPUTE_BOUND)
    for _ in range(500):
        play.step(range(4), 0.01, drafting_seconds=1e-3)
    begin = play.clock.now
    for _ in range(1000):
        play.step(range(4), 0.01, drafting_seconds=1e-3)
    assert play.clock.now - begin < 1000 * (0.002 + 4e-3) / 0.98


def test_drafts_that_begin_to_be_kept_are_found_out() -> None:
    """After a bad start the probes see that it pays now, and drafting begins again."""
    play = Play((0.02, 1e-3))
    for _ in range(300):
        play.step([0], 0.001)
    assert play.num_asked[-1] == 0
    for _ in range(700):
        play.step([0], 0.95)
    assert np.mean(play.num_verified[-50:]) > 4


def test_bad_luck_at_first_is_not_believed_for_long() -> None:
    """Drafts that are worth their rows are found to be, though the first eight were not kept."""
    play = Play((0.002, 1e-3))
    for _ in range(8):
        play.step([0], 0.0)
    for _ in range(300):
        play.step([0], 0.9)
    assert np.mean(play.num_verified[-50:]) > 1


def test_a_hard_stretch_is_passed_in_plain_steps() -> None:
    """A second has the price of the long run: after easy drafts poor ones are refused.

    Who never saw better takes them.
    """
    line = (0.01, 1e-3)
    spoilt, modest = Play(line), Play(line)
    for _ in range(300):
        spoilt.step([0], 0.95)
    for _ in range(300):
        modest.step([0], 0.3)
    assert spoilt.policy.price > 1.3 * modest.policy.price


def test_asking_for_free_finds_good_drafts_soon() -> None:
    """What a draft looks like needs no row: after long poor ones, good ones are seen in 20 steps.

    The margins tell them apart.
    """
    play = Play(COMPUTE_BOUND)
    for step in range(400):
        good = step % 4 == 0
        play.step([0], 0.9 if good else 0.05, margin=6.0 if good else 0.2)
    for _ in range(100):
        play.step([0], 0.05, margin=0.2)
    assert sum(play.num_verified[-20:]) <= 2
    for _ in range(20):
        play.step([0], 0.9, margin=6.0)
    assert sum(play.num_verified[-20:]) > 0


def test_drafts_that_take_too_long_are_not_asked_for() -> None:
    """They would be kept, but a step that waits for them is not worth it: draft_time."""
    registry = CollectorRegistry()
    play = Play((0.02, 1e-3), registry=registry)
    for _ in range(400):
        play.step([0], 0.7, drafting_seconds=0.1)
    assert sum(count > 0 for count in play.num_asked[200:]) < 5
    assert series(registry)["drafthouse_policy_regime{state=draft_time}"] == 1


def test_under_load_drafting_ends_and_comes_back_after_it() -> None:
    """One K per batch size would do as much; here it follows from the price of a row."""
    registry = CollectorRegistry()
    play = Play((0.02, 1e-3), registry=registry)
    for _ in range(100):
        play.step([0], 0.6)
    alone = np.mean(play.num_verified[-20:])
    for _ in range(100):
        play.step(range(64), 0.6)
    together = np.mean(play.num_verified[-20:]) / 64
    assert play.policy.drafting is False
    assert series(registry)["drafthouse_policy_regime{state=load}"] == 1
    play.policy.forget(range(1, 64))
    for _ in range(100):
        play.step([0], 0.6)
    assert alone > 2
    assert together < 0.2
    assert np.mean(play.num_verified[-20:]) > 2


def test_at_a_boundary_the_regime_changes_at_most_once_a_second() -> None:
    """A load that swings across the point where drafting pays, several times a second."""
    registry = CollectorRegistry()
    play = Play((0.02, 1e-3), registry=registry)
    begin = play.clock.now
    changed_at = []
    drafting = True
    for step in range(1000):
        now = play.clock.now
        play.step(range(4 if step % 8 < 4 else 40), 0.55, drafting_seconds=2e-3)
        if play.policy.drafting != drafting:
            drafting = play.policy.drafting
            changed_at.append(now)
    assert all(np.diff(changed_at) >= 1.0)
    changes = sum(
        value for name, value in series(registry).items() if "policy_changes_total" in name
    )
    assert changes == len(changed_at) <= play.clock.now - begin


def test_a_request_of_higher_priority_goes_deeper() -> None:
    """Its tokens weigh more where rows are scarce."""
    play = Play((0.004, 1e-3))
    for _ in range(200):
        play.step(range(4), 0.7, priorities={0: 4, 1: -4})
    urgent = sum(play.step(range(4), 0.7, priorities={0: 4, 1: -4}).get(0, 0) for _ in range(20))
    patient = sum(play.step(range(4), 0.7, priorities={0: 4, 1: -4}).get(1, 0) for _ in range(20))
    assert urgent > patient
    assert weight_of(100) == weight_of(4) == pytest.approx(1 / weight_of(-4)) == pytest.approx(4)


def test_the_callers_cap_is_kept() -> None:
    """At most so many are asked for, and none with a cap of 0."""
    play = Play(MEMORY_BOUND)
    for _ in range(20):
        assert max(play.step(range(4), 0.9, max_drafts=3).values(), default=0) <= 3
        assert play.step(range(4), 0.9, max_drafts=0) == {}


def test_nobody_is_asked_when_nobody_decodes() -> None:
    """No candidates, no drafter call; nor with a cap of 0."""
    assert Play(MEMORY_BOUND).policy.choose([], shape(1)) == {}
    policy = AdaptivePolicy(cost(*MEMORY_BOUND), num_speculative_tokens=0)
    assert policy.choose([Candidate(seq_id=1, num_tokens=4)], shape(1)) == {}


def test_a_stalled_drafter_is_given_up_at_once() -> None:
    """After one wait as long as patience allows, probes wait 3% of the time at most."""
    play = Play(MEMORY_BOUND)
    for _ in range(50):
        play.step([0, 1], 0.9, drafting_seconds=1e-3)
    patience = play.policy.patience_seconds
    assert 0.005 <= patience < 0.5
    waits = []
    for step in range(200):
        candidates = [Candidate(seq_id=seq_id, num_tokens=500 + step) for seq_id in (0, 1)]
        if play.policy.choose(candidates, shape(2)):
            waits.append(play.policy.patience_seconds)
            play.clock.now += waits[-1]
            assert play.policy.admit({}, shape(2)) == {}
        play.clock.now += 0.02
        play.policy.observe(
            StepRecord(shape=shape(2), outcomes=(), draft_seconds=0.0, target_seconds=0.02)
        )
    assert sum(waits[1:]) < 0.03 * 200 * 0.02


def test_where_drafts_cannot_be_cut_only_what_should_pay_is_asked_for() -> None:
    """Under the ratio rule `choose` alone decides, by what is known before the draft."""
    play = Play((0.02, 2e-3), trims=False)
    for _ in range(200):
        play.step(range(4), 0.6)
    assert 1 <= np.mean(play.num_verified[-50:]) / 4 <= 4


def test_a_decision_can_be_explained() -> None:
    """Positions, survivals, price and reason are there, and as text."""
    play = Play((0.02, 1e-3))
    for _ in range(30):
        counts = play.step(range(3), 0.8)
    decision = play.policy.explain()[-1]
    assert dict(zip(decision.seq_ids, decision.admitted.tolist(), strict=True)) == counts
    assert decision.survivals.shape == (3, CAP)
    assert (np.diff(decision.survivals, axis=1) <= 0).all()
    assert decision.reason == "drafting"
    assert decision.price == play.policy.price > 0
    text = str(decision)
    assert text.startswith(f"step {decision.step}: drafting; price ")
    assert len(text.splitlines()) == 4
    assert len(play.policy.explain()) <= 64


def test_every_series_is_there_before_the_first_step() -> None:
    """At zero: a rate over it is never a gap."""
    registry = CollectorRegistry()
    Play(MEMORY_BOUND, registry=registry)
    values = series(registry)
    for to in ("drafting", "plain"):
        for reason in ("load", "acceptance", "draft_time"):
            name = f"drafthouse_policy_changes_total{{to={to},reason={reason}}}"
            assert values[name] == 0
    assert values["drafthouse_calibration_error"] == 0
    assert values["drafthouse_policy_admitted_tokens_total"] == 0


@settings(max_examples=25, deadline=None)
@given(
    line=st.sampled_from([MEMORY_BOUND, COMPUTE_BOUND, (0.02, 1e-3)]),
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
            st.floats(0, 1),
            st.sampled_from([None, 0, 1, 3]),
        ),
        max_size=12,
    ),
)
def test_whatever_comes_caps_are_kept_and_nothing_is_left_behind(
    line: tuple[float, float], steps: list[tuple[list[int], float, int | None]]
) -> None:
    """Admitted is no more than asked, asked no more than any cap; forgotten is forgotten."""
    play = Play(line)
    for seq_ids, chance, cap in steps:
        counts = play.step(seq_ids, chance, max_drafts=cap)
        assert set(counts) <= set(seq_ids)
        assert all(0 <= count <= (CAP if cap is None else cap) for count in counts.values())
    assert play.policy.num_sequences <= 10
    play.policy.forget(list(range(10)))
    assert play.policy.num_sequences == 0


@pytest.mark.parametrize("length", [0, 1, 5])
def test_drafts_may_be_shorter_than_asked_or_missing(length: int) -> None:
    """A drafter answers what it likes: no more than what came is admitted."""
    play = Play(MEMORY_BOUND)
    for step in range(20):
        candidates = [Candidate(seq_id=seq_id, num_tokens=50 + step) for seq_id in (1, 2)]
        if not play.policy.choose(candidates, shape(2)):
            continue
        draft = Draft((1,) * length, margins=(1.0,) * length, drafter="fake")
        admitted = play.policy.admit({1: draft}, shape(2))
        assert admitted.get(1, 0) <= length
        assert admitted.get(2, 0) == 0
        outcome = Outcome(seq_id=1, draft=draft.first(admitted.get(1, 0)), num_accepted=0)
        play.policy.observe(
            StepRecord(shape=shape(2), outcomes=(outcome,), draft_seconds=0.0, target_seconds=0.02)
        )
