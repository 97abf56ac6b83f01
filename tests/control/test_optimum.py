"""How many rows pay, against trying everything."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.optimum import admitted, best_rate, price_of_row


@st.composite
def offers(draw: st.DrawFn) -> np.ndarray:
    """Values of some drafts' positions: survivals (falling along a draft) times a weight."""
    count, length = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    chances = draw(st.lists(st.floats(0, 1), min_size=count * length, max_size=count * length))
    weights = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=count, max_size=count))
    survivals = np.cumprod(np.array(chances).reshape(count, length), axis=1)
    return survivals * np.array(weights)[:, None]


@st.composite
def costs(draw: st.DrawFn, size: int = 17) -> np.ndarray:
    """Seconds of steps with 0, 1, 2, ... drafts: any that do not fall, with jumps."""
    rises = draw(
        st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.1]), min_size=size - 1, max_size=size - 1)
    )
    return np.concatenate([[0.05], 0.05 + np.cumsum(rises)])


def net(values: np.ndarray, counts: np.ndarray, seconds: np.ndarray, goodput: float) -> float:
    """What those first positions bring, beyond what their time would bring otherwise."""
    taken = np.arange(values.shape[1]) < np.asarray(counts)[:, None]
    return float((values * taken).sum() - goodput * (seconds[taken.sum()] - seconds[0]))


@settings(max_examples=150, deadline=None)
@given(values=offers(), seconds=costs(), goodput=st.floats(0.1, 100))
def test_no_choice_of_prefixes_is_better(
    values: np.ndarray, seconds: np.ndarray, goodput: float
) -> None:
    """Every combination of prefixes is tried; jumps in the cost are seen through."""
    chosen = admitted(values, seconds[: values.size + 1], goodput=goodput)
    best = max(
        net(values, np.array(counts), seconds, goodput)
        for counts in product(range(values.shape[1] + 1), repeat=len(values))
    )
    assert net(values, chosen, seconds, goodput) == pytest.approx(best, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(values=offers(), seconds=costs(), goodput=st.floats(0.1, 100), factor=st.floats(1, 10))
def test_a_higher_price_never_admits_more(
    values: np.ndarray, seconds: np.ndarray, goodput: float, factor: float
) -> None:
    """The dearer a second is, the fewer rows."""
    seconds = seconds[: values.size + 1]
    cheap = admitted(values, seconds, goodput=goodput)
    dear = admitted(values, seconds, goodput=goodput * factor)
    assert dear.sum() <= cheap.sum()


def test_of_equal_positions_the_earlier_come_first() -> None:
    """Certain drafts are still taken from the front: what is admitted is a prefix of each."""
    seconds = np.array([0.01, 0.011, 0.012, 0.013, 0.1, 0.2, 0.3])
    assert admitted(np.ones((2, 3)), seconds, goodput=20).tolist() == [3, 0]


def test_worthless_rows_are_not_taken_though_they_cost_nothing() -> None:
    """What is never kept, and what is beyond a draft's end, is no row."""
    values = np.array([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert admitted(values, np.full(7, 0.01), goodput=100).tolist() == [1, 0]


@settings(max_examples=50, deadline=None)
@given(values=offers(), seconds=costs())
def test_the_best_rate_is_the_best_ratio(values: np.ndarray, seconds: np.ndarray) -> None:
    """With one kind of step it is the most tokens over seconds that any choice gives."""
    seconds = seconds[: values.size + 1]
    falling = np.concatenate([[0.0], np.cumsum(np.sort(values.ravel())[::-1])])
    best = ((4 + falling) / seconds).max()
    rate = best_rate(values.reshape(1, -1), seconds, plain=4)
    assert rate.goodput <= best * (1 + 1e-9)
    assert rate.goodput >= 0.95 * best  # two rounds of the iteration
    assert rate.when_waiting(0.0) == rate.goodput


def test_the_price_is_the_slope_where_the_step_is() -> None:
    """Tokens that a row's time would bring otherwise; nothing where rows are free."""
    seconds = 0.01 + 0.002 * np.arange(100)
    assert price_of_row(seconds, 20, goodput=50) == pytest.approx(0.1)
    assert price_of_row(np.full(100, 0.01), 20, goodput=50) == 0
    assert price_of_row(np.array([0.01]), 0, goodput=50) == 0


def test_a_tile_is_paid_by_all_its_rows() -> None:
    """At the last row of a tile the price is not that of the next tile's first row."""
    seconds = 0.01 + 0.003 * np.ceil((4 + np.arange(100)) / 16)
    edge = price_of_row(seconds, 28, goodput=100)
    assert edge == pytest.approx(100 * 0.003 / 16, rel=0.6)
