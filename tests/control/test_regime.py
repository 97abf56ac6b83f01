"""Drafting as a whole: ends where it costs, and where it long brought nothing."""

from cluster.control.regime import STAY_SECONDS, Regime


def test_what_costs_ends_at_once() -> None:
    """Waiting for drafts that bring less is not waited out."""
    regime = Regime()
    assert regime.changes(-0.01, now=0.0)
    assert not regime.drafting


def test_what_brings_nothing_and_costs_nothing_is_not_ended_by_a_moment() -> None:
    """Nobody was asked for less than a second, then it pays again: no change."""
    regime = Regime()
    for step in range(100):
        gain = 0.1 if step % 10 == 0 else 0.0
        assert not regime.changes(gain, now=step * 0.09 * STAY_SECONDS)
    assert regime.drafting


def test_a_second_of_nothing_ends_it() -> None:
    """Then the regime says what holds."""
    regime = Regime()
    assert not regime.changes(0.1, now=0.0)
    assert not regime.changes(0.0, now=0.9 * STAY_SECONDS)
    assert regime.changes(0.0, now=STAY_SECONDS)
    assert not regime.drafting


def test_it_changes_at_most_once_a_second_and_not_for_the_last_percent() -> None:
    """Whatever the gain does."""
    regime = Regime()
    assert regime.changes(-1.0, now=0.0)
    assert not regime.changes(1.0, now=0.99 * STAY_SECONDS)
    assert not regime.changes(0.005, now=STAY_SECONDS)
    assert regime.changes(0.02, now=STAY_SECONDS)
    assert not regime.changes(-1.0, now=1.5 * STAY_SECONDS)
