"""Who gets which draft workers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.leases import CLEARLY, MOST_MOVED, Claim, Leases, lease

claims = st.builds(
    Claim, demand=st.floats(0.25, 64), worth=st.floats(0, 50), sequences=st.floats(1, 64)
)
parties = st.dictionaries(
    st.integers(0, 9).map(lambda number: f"engine-{number}"), claims, min_size=1, max_size=8
)


def workers(count: int) -> list[str]:
    return [f"worker-{number:02}" for number in range(count)]


def total(parties: dict[str, Claim], leases: Leases) -> float:
    """Tokens a second that all workers bring."""
    return sum(
        parties[name].marginal(count) for name, held in leases.items() for count in range(len(held))
    )


@given(parties, st.integers(1, 20))
def test_every_claim_has_a_worker_and_no_worker_is_idle_or_shared_without_need(
    parties: dict[str, Claim], count: int
) -> None:
    """As many as there are, all in use; shared only where there are fewer than engines."""
    leases, num_moved = lease(parties, workers(count), {})
    assert leases.keys() == parties.keys()
    assert all(leases.values())
    assert num_moved == 0
    held = [worker for names in leases.values() for worker in names]
    if count >= len(parties):
        assert sorted(held) == workers(count)
    else:
        assert len(held) == len(parties)
        assert set(held) == set(workers(count))


@given(parties, st.integers(8, 20))
def test_no_other_sharing_out_brings_more(parties: dict[str, Claim], count: int) -> None:
    """From nothing, each worker goes where it brings most: no single change is better."""
    leases, _ = lease(parties, workers(count), {})
    best = total(parties, leases)
    for loser in parties:
        for winner in parties.keys() - {loser}:
            if len(leases[loser]) < 2:
                continue
            other = leases | {
                loser: leases[loser][1:],
                winner: (*leases[winner], leases[loser][0]),
            }
            assert total(parties, other) <= best * (1 + 1e-9)


@given(parties, parties, st.integers(1, 20), st.integers(1, 20))
def test_few_workers_move_and_none_for_little(
    before: dict[str, Claim], after: dict[str, Claim], old_count: int, count: int
) -> None:
    """Whatever changed: all engines are served, most workers stay, and moving is worth it."""
    old, _ = lease(before, workers(old_count), {})
    leases, num_moved = lease(after, workers(count), old)
    assert leases.keys() == after.keys()
    assert all(leases.values())
    if count < len(after):
        return
    had_none = sum(not set(old.get(name, ())) & set(workers(count)) for name in after)
    assert num_moved <= max(count // MOST_MOVED, 1) + had_none + len(after)
    again, moved_again = lease(after, workers(count), leases)
    if moved_again == 0:
        assert {name: set(held) for name, held in again.items()} == {
            name: set(held) for name, held in leases.items()
        }


@settings(max_examples=50)
@given(parties, parties, st.integers(8, 20))
def test_it_comes_to_rest(before: dict[str, Claim], after: dict[str, Claim], count: int) -> None:
    """Under loads that stay the same the moving ends, and near the best there is."""
    leases, _ = lease(before, workers(count), {})
    for _ in range(2 * count):
        leases, num_moved = lease(after, workers(count), leases)
        if not num_moved:
            break
    assert num_moved == 0
    best, _ = lease(after, workers(count), {})
    assert total(after, leases) * CLEARLY >= total(after, best) * (1 - 1e-9)


def test_the_busy_and_the_well_drafted_get_more() -> None:
    """Marginal goodput, not numbers: demand counts, and what a draft brings counts."""
    parties = {"busy": Claim(32, 10, 4), "calm": Claim(2, 10, 4), "poor": Claim(32, 0.1, 4)}
    leases, _ = lease(parties, workers(10), {})
    assert len(leases["busy"]) > 6
    assert len(leases["calm"]) == 1
    assert len(leases["poor"]) == 1


def test_a_small_change_moves_nobody() -> None:
    """Hysteresis: what a worker knows is worth more than a few percent."""
    even = {"a": Claim(8, 10, 4), "b": Claim(8, 10, 4)}
    leases, _ = lease(even, workers(4), {})
    tilted = {"a": Claim(8, 11, 4), "b": Claim(8, 10, 4)}
    assert lease(tilted, workers(4), leases) == (leases, 0)
    changed = {"a": Claim(32, 10, 4), "b": Claim(1, 10, 4)}
    moved, num_moved = lease(changed, workers(4), leases)
    assert num_moved == 1
    assert len(moved["a"]) == 3


def test_a_dead_worker_is_replaced_from_where_it_is_missed_least() -> None:
    """One that dies leaves an engine without: another gives one up in the same round."""
    even = {"a": Claim(8, 10, 4), "b": Claim(8, 10, 4)}
    leases, _ = lease(even, workers(3), {})
    [alone] = [name for name, held in leases.items() if len(held) == 1]
    left = [worker for worker in workers(3) if worker not in leases[alone]]
    after, _ = lease(even, left, leases)
    assert {len(held) for held in after.values()} == {1}
    after, num_moved = lease(even, workers(3), after)
    assert num_moved == 0
    assert sum(map(len, after.values())) == 3


def test_shared_workers_have_even_shares_and_keep_their_engines() -> None:
    """With fewer workers than engines: no worker has more than its part and the largest engine."""
    parties = {f"engine-{number}": Claim(1 + number % 5, 10, 4) for number in range(20)}
    leases, _ = lease(parties, workers(4), {})
    loads = dict.fromkeys(workers(4), 0.0)
    for name, (worker,) in leases.items():
        loads[worker] += parties[name].demand
    assert max(loads.values()) - min(loads.values()) <= 5
    assert lease(parties, workers(4), leases)[0] == leases
    after, _ = lease(parties, workers(3), leases)
    stayed = [name for name in parties if leases[name][0] != workers(4)[3]]
    assert sum(after[name] == leases[name] for name in stayed) > len(stayed) / 2
