"""When new draft weights go back: certainty, patience, and what survives a router."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.draft_pools import DraftPools
from cluster.control.rollback import (
    LEAST_VERIFIED,
    SETTLED,
    TOLERATED,
    Acceptance,
    Verdict,
    judge,
    lost_at_least,
)
from cluster.messages import DraftLoad, DraftWeights, VersionGrade


@st.composite
def acceptances(draw: st.DrawFn, least: int = 1) -> Acceptance:
    """Some of some."""
    num_verified = draw(st.integers(least, 20_000))
    return Acceptance(num_verified, draw(st.integers(0, num_verified)))


def trial(old_rate: float, new_rate: float, *, seed: int, step: int = 50) -> tuple[Verdict, int]:
    """Ask after every few positions, as the router does; the outcome and how many it took."""
    source = random.Random(seed)
    old = Acceptance(4000, round(4000 * old_rate))
    num_verified = num_accepted = 0
    while True:
        num_verified += step
        num_accepted += sum(source.random() < new_rate for _ in range(step))
        verdict = judge(old, Acceptance(num_verified, num_accepted))
        if verdict is not Verdict.WAIT:
            return verdict, num_verified


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_weights_as_good_as_before_stay(rate: float) -> None:
    """Asked a hundred times in each of forty trials, chance never looks like a loss."""
    outcomes = [trial(rate, rate, seed=seed) for seed in range(40)]
    assert outcomes == [(Verdict.KEEP, SETTLED)] * 40


@pytest.mark.parametrize(("old", "new"), [(0.9, 0.05), (0.8, 0.5), (0.3, 0.0)])
def test_a_clear_loss_is_seen_as_soon_as_anything_may_be(old: float, new: float) -> None:
    """Drafts that are mostly wrong cost the fewest positions that decide at all."""
    for seed in range(20):
        assert trial(old, new, seed=seed) == (Verdict.RETURN, LEAST_VERIFIED)


def test_a_small_loss_is_seen_too() -> None:
    """Ten points are a loss; it takes some thousand positions to be sure."""
    outcomes = [trial(0.8, 0.7, seed=seed) for seed in range(20)]
    assert {verdict for verdict, _ in outcomes} == {Verdict.RETURN}


def test_independent_runs_hold_in_the_interval() -> None:
    """The lower end is over the true loss in next to none of 2,000 pairs of samples."""
    source = random.Random(0)
    num_over = 0
    for _ in range(2000):
        old = Acceptance(400, sum(source.random() < 0.7 for _ in range(400)))
        new = Acceptance(400, sum(source.random() < 0.6 for _ in range(400)))
        num_over += lost_at_least(old, new) > 0.1
    assert num_over == 0


@given(old=acceptances(), new=acceptances())
def test_the_interval_holds_what_was_seen(old: Acceptance, new: Acceptance) -> None:
    """Its lower end is never over the difference itself, and is a number for any counts."""
    assert -1.5 < lost_at_least(old, new) <= old.rate - new.rate


@given(old=acceptances(), new=acceptances(), more=st.integers(0, 1000))
def test_better_weights_are_never_returned_for_being_better(
    old: Acceptance, new: Acceptance, more: int
) -> None:
    """If so many kept positions do not send weights back, more of them do not either."""
    if judge(old, new) is not Verdict.RETURN:
        kept = min(new.num_accepted + more, new.num_verified)
        assert judge(old, Acceptance(new.num_verified, kept)) is not Verdict.RETURN


@given(old=acceptances(), new=acceptances())
def test_nothing_is_decided_on_little(old: Acceptance, new: Acceptance) -> None:
    """Few positions of either leave everything as it is, and a loss is over the tolerated one."""
    verdict = judge(old, new)
    if new.num_verified < LEAST_VERIFIED:
        assert verdict is Verdict.WAIT
    if verdict is Verdict.RETURN:
        assert old.num_verified >= LEAST_VERIFIED
        assert old.rate - new.rate > TOLERATED


def load(
    weights: DraftWeights | None = None, *grades: tuple[int, int, int], version: int = 0
) -> DraftLoad:
    return DraftLoad(
        version=version,
        weights=weights or DraftWeights(),
        grades=tuple(
            VersionGrade(version=version, num_verified=verified, num_accepted=accepted)
            for version, verified, accepted in grades
        ),
    )


def test_a_bad_version_goes_back_to_the_trusted_one() -> None:
    """All workers' positions count together; two bad versions in a row end at the good one."""
    pools = DraftPools()
    pools.hear("p", "a", load(None, (0, 200, 180)))
    pools.hear("p", "b", load(None, (0, 200, 180)))
    first = pools.swap("p", "/first", "node")
    second = pools.swap("p", "/second", "node")
    assert (first.version, second.version) == (1, 2)
    assert second.previous == DraftWeights()
    pools.hear("p", "a", load(second, (0, 200, 180), (2, 200, 10)))
    assert pools.judge() == []
    pools.hear("p", "b", load(second, (0, 200, 180), (2, 200, 10)))
    [decision] = pools.judge()
    assert (decision.pool, decision.verdict) == ("p", Verdict.RETURN)
    assert decision.new == Acceptance(400, 20)
    assert pools.weights == {"p": DraftWeights(version=0, turn=3)}
    assert pools.judge() == []


def test_a_version_number_is_never_used_twice() -> None:
    """Grades of a version that was sent back are not taken for those of the next one."""
    pools = DraftPools()
    pools.hear("p", "a", load(None, (0, 1000, 900)))
    pools.swap("p", "/bad", "")
    pools.hear("p", "a", load(None, (0, 1000, 900), (1, 1000, 10)))
    assert [each.verdict for each in pools.judge()] == [Verdict.RETURN]
    assert pools.swap("p", "/bad", "").version == 2
    assert pools.judge() == []


def test_a_version_that_has_proved_itself_is_what_is_returned_to() -> None:
    """After SETTLED positions a trial is over, and nothing worse takes the place of its weights."""
    pools = DraftPools()
    pools.hear("p", "a", load(None, (0, 1000, 500)))
    good = pools.swap("p", "/good", "")
    pools.hear("p", "a", load(good, (0, 1000, 500), (1, SETTLED, SETTLED // 2)))
    assert [each.verdict for each in pools.judge()] == [Verdict.KEEP]
    assert pools.weights["p"] == DraftWeights(version=1, turn=2, folder="/good")
    pools.swap("p", "/bad", "")
    pools.hear("p", "a", load(None, (1, 1000, 500), (2, 1000, 10)))
    pools.judge()
    assert pools.weights["p"] == DraftWeights(version=1, turn=4, folder="/good")


def test_a_router_that_begins_anew_goes_on_with_the_trial() -> None:
    """It takes the latest decision that any worker has heard of, and what the old weights were."""
    before = DraftPools()
    before.hear("p", "a", load())
    on_trial = before.swap("p", "/new", "node")
    pools = DraftPools()
    pools.hear("p", "b", load(None, (0, 1000, 900)))  # has not heard of it yet
    pools.hear("p", "a", load(on_trial, (0, 1000, 900), (1, 1000, 100), version=1))
    pools.hear("p", "b", load(None, (0, 1000, 900)))
    assert pools.weights["p"] == on_trial
    assert [each.weights.version for each in pools.judge()] == [0]
    assert pools.swap("p", "/next", "").version == 2


def test_pools_are_judged_apart() -> None:
    """What one pool's weights are worth says nothing of another's."""
    pools = DraftPools()
    for name in ("p", "q"):
        pools.hear(name, f"{name}-1", load(None, (0, 1000, 900)))
        pools.swap(name, "/new", "")
    pools.hear("p", "p-1", load(None, (0, 1000, 900), (1, 1000, 900)))
    pools.hear("q", "q-1", load(None, (0, 1000, 900), (1, 1000, 100)))
    assert [each.pool for each in pools.judge()] == ["q"]
    assert {name: weights.version for name, weights in pools.weights.items()} == {"p": 1, "q": 0}
