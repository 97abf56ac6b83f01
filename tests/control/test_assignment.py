"""The slow loop: leases, price floors and hints from loads."""

from dataclasses import replace

import pytest

from cluster.control.assignment import FLOOR_STEP, MOST_FLOOR, Assignment, SlowLoop
from cluster.messages import DraftLoad, EngineLoad
from tests.control.test_routing import LOAD

BUSY = replace(
    LOAD,
    running=4,
    tokens_per_second=100.0,
    accepted_per_second=40.0,
    drafted_per_second=60.0,
)
CROWDED = replace(BUSY, waiting=8)
FULL = DraftLoad(num_sequences=2, busy_ratio=0.9)
WORKERS = {"pool": {f"worker-{number}": FULL for number in range(4)}}


def rounds(loop: SlowLoop, count: int, engines: dict[str, EngineLoad | None]) -> Assignment:
    """The last of so many rounds under the same loads."""
    for _ in range(count):
        assignment = loop.round(engines, WORKERS)
    return assignment


def test_an_engine_that_has_not_told_may_use_all() -> None:
    """Nothing is withheld for want of knowledge."""
    assert rounds(SlowLoop(), 1, {"new": None}).leases == {}


def test_engines_with_work_have_workers_of_their_own() -> None:
    """Two busy engines share four workers evenly; one at rest asks some of theirs."""
    leases = rounds(SlowLoop(), 3, {"a": BUSY, "b": BUSY, "idle": LOAD}).leases
    assert len(leases["a"]) == len(leases["b"]) == 2
    assert not set(leases["a"]) & set(leases["b"])
    assert leases["idle"]


def test_workers_follow_the_work() -> None:
    """When one engine comes to rest its workers go to the other, and back when it has work."""
    loop = SlowLoop()
    rounds(loop, 3, {"a": BUSY, "b": BUSY})
    assert len(rounds(loop, 20, {"a": BUSY, "b": LOAD}).leases["a"]) == 4
    back = rounds(loop, 20, {"a": BUSY, "b": BUSY}).leases
    assert len(back["a"]) == len(back["b"]) == 2


def test_who_drafts_in_vain_has_one_worker() -> None:
    """Where drafts are not kept workers bring little; one stays, to notice when they are."""
    poor = replace(BUSY, accepted_per_second=0.0)
    leases = rounds(SlowLoop(), 10, {"a": BUSY, "poor": poor}).leases
    assert (len(leases["a"]), len(leases["poor"])) == (3, 1)


def test_pools_are_leased_apart() -> None:
    """An engine has workers of each pool, whatever the other pools do."""
    workers = {
        "small": {"s-0": DraftLoad(), "s-1": DraftLoad()},
        "large": {"l-0": None},
        "empty": {},
    }
    leases = SlowLoop().round({"a": BUSY, "b": BUSY}, workers).leases
    for held in leases.values():
        assert "l-0" in held
        assert len([name for name in held if name.startswith("s-")]) == 1


def test_without_workers_nobody_has_any() -> None:
    """An assignment names no worker that is not there, also after it was."""
    loop = SlowLoop()
    rounds(loop, 2, {"a": BUSY})
    assert loop.round({"a": BUSY}, {}).leases == {"a": ()}


def test_drafts_become_dearer_while_requests_wait_and_cheaper_after() -> None:
    """A step a round, up to a limit; gone a while after the wait is. Others are not concerned."""
    loop = SlowLoop()
    engines = {"a": CROWDED, "b": BUSY}
    assert loop.round(engines, {}).floors == {"a": FLOOR_STEP}
    for _ in range(100):
        floors = loop.round(engines, {}).floors
    assert floors == {"a": MOST_FLOOR}
    assert loop.round({"a": CROWDED}, {}).hints.least_floor == MOST_FLOOR
    before = MOST_FLOOR
    while floors := loop.round({"a": LOAD, "b": BUSY}, {}).floors:
        assert floors["a"] == pytest.approx(before - FLOOR_STEP)
        before = floors["a"]


def test_hints_tell_what_one_more_worker_would_bring() -> None:
    """The drafts' part of the tokens, the engines that have work, and ever less for the next."""
    engines: dict[str, EngineLoad | None] = {"a": BUSY, "b": BUSY, "idle": LOAD}
    hints = rounds(SlowLoop(), 20, engines).hints
    assert hints.wait_seconds > 0
    pool = hints.pools["pool"]
    assert (pool.num_engines, pool.num_workers) == (2, 4)
    assert pool.gain == pytest.approx(0.4)
    fewer = SlowLoop()
    for _ in range(20):
        one = fewer.round(engines, {"pool": {"worker": DraftLoad()}}).hints.pools["pool"]
    assert one.marginal > pool.marginal > 0


def test_what_workers_can_serve_is_told_by_how_busy_they_are() -> None:
    """Workers that are full with few sequences are wanted in greater number."""
    full = {"pool": {"w": DraftLoad(num_sequences=2, busy_ratio=0.9)}}
    bored = {"pool": {"w": DraftLoad(num_sequences=2, busy_ratio=0.11)}}
    engines: dict[str, EngineLoad | None] = {"a": BUSY, "b": BUSY}
    wanted = [SlowLoop().round(engines, workers).hints.pools["pool"] for workers in (full, bored)]
    assert wanted[0].marginal > wanted[1].marginal


def test_a_round_of_a_thousand_engines_is_a_bounded_number_of_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 engines, 2,000 workers: a few marginals for each, not one for every pair."""
    from cluster.control import leases as module  # noqa: PLC0415

    num_asked = 0
    marginal = module.Claim.marginal

    def counted(claim: module.Claim, num_workers: int) -> float:
        nonlocal num_asked
        num_asked += 1
        return marginal(claim, num_workers)

    monkeypatch.setattr(module.Claim, "marginal", counted)
    engines: dict[str, EngineLoad | None] = {
        f"engine-{number:04}": replace(BUSY, running=1 + number % 4) for number in range(1000)
    }
    workers = {"pool": {f"worker-{number:04}": DraftLoad() for number in range(2000)}}
    loop = SlowLoop()
    assignment = loop.round(engines, workers)
    assert sum(map(len, assignment.leases.values())) == 2000
    assert num_asked < 10 * (1000 + 2000)
