"""A price floor makes drafts fewer, and a policy may not go under it."""

import pytest

from tests.control.test_adaptive import CAP, MEMORY_BOUND, Play


def play_with(floor: float) -> Play:
    """Drafts of four in five kept, where rows cost next to nothing."""
    play = Play(MEMORY_BOUND)
    for _ in range(100):
        play.step(range(4), 0.8)
    play.policy.price_floor = floor
    for _ in range(100):
        play.step(range(4), 0.8)
    return play


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.5, 0.7])
def test_the_price_is_never_under_the_floor(floor: float) -> None:
    """Drafters are told the floor, and stop there by themselves."""
    assert play_with(floor).policy.price >= floor


def test_the_higher_the_floor_the_fewer_drafts_are_verified() -> None:
    """All positions where rows are free; under a floor those that are likely enough to be kept."""
    verified = [sum(play_with(floor).num_verified[-50:]) for floor in (0.0, 0.3, 0.6, 0.95)]
    assert verified[0] > 0.9 * 4 * CAP * 50
    assert verified == sorted(verified, reverse=True)
    assert verified[2] < 0.6 * verified[0]
    assert verified[3] < 0.2 * verified[0]
