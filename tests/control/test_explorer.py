"""What may be spent on finding out."""

import pytest

from cluster.control.explorer import INCOME, LEAST_INCOME, Explorer


def spent(explorer: Explorer, num_steps: int) -> float:
    """Seconds that could be spent in so many steps of a second, all of it at once when earned."""
    total = 0.0
    for _ in range(num_steps):
        explorer.earn(1.0, 1)
        total += explorer.credit
        explorer.spend(explorer.credit)
    return total


def test_no_more_is_spent_than_a_little_and_a_part_of_the_time() -> None:
    """The first steps' worth, and then the income."""
    explorer = Explorer()
    first = spent(explorer, 1)
    assert spent(explorer, 1000) == pytest.approx(1000 * INCOME)
    assert first < 10


def test_where_nothing_is_ever_kept_less_is_spent_until_something_is() -> None:
    """A hundred barren tries leave the least; one that is kept brings all of it back."""
    explorer = Explorer()
    spent(explorer, 1)
    for _ in range(100):
        explorer.learn(kept=False)
    assert spent(explorer, 1000) == pytest.approx(1000 * LEAST_INCOME)
    explorer.learn(kept=True)
    assert spent(explorer, 1000) == pytest.approx(1000 * INCOME)


def test_who_has_saved_is_rich_and_who_spends_is_not() -> None:
    """So that what was put off is tried sooner when nothing else was worth trying."""
    explorer = Explorer()
    spent(explorer, 1)
    explorer.earn(1.0, 1)
    assert not explorer.is_rich
    for _ in range(2000):
        explorer.earn(1.0, 1)
    assert explorer.is_rich
    for _ in range(100):
        explorer.learn(kept=False)
    assert not explorer.is_rich  # what is saved since nothing helps is not spent on it
