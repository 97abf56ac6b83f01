"""The cost table and the cost of drafts: fitted, monotone, and corrected by what happens."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.cost import CostTable
from cluster.control.draft_cost import DraftCost
from cluster.control.policy import StepShape


def shape(num_rows: int, num_sequences: int = 1, num_context_tokens: int = 100) -> StepShape:
    """A step's shape."""
    return StepShape(
        num_sequences=num_sequences, num_rows=num_rows, num_context_tokens=num_context_tokens
    )


def truth(step: StepShape) -> float:
    """Seconds that depend on rows, sequences and context."""
    mean_context = step.num_context_tokens / step.num_sequences
    return (
        0.03
        + 0.0015 * step.num_rows
        + 0.0008 * step.num_sequences
        + 1e-6 * step.num_context_tokens
        + 5e-8 * step.num_rows * mean_context
    )


GRID = [
    shape(count * rows, count, count * context)
    for count in (1, 2, 4, 8, 16)
    for rows in (1, 2, 3, 5, 9)
    for context in (64, 512, 1900)
]


def test_the_table_says_what_was_measured_and_what_lies_between() -> None:
    """Rows, sequences and context each have their part."""
    table = CostTable({step: truth(step) for step in GRID})
    for step in (*GRID, shape(7, 1, 300), shape(30, 6, 6000)):
        assert table.seconds(step) == pytest.approx(truth(step), rel=0.01)


def test_extra_rows_one_by_one_and_all_at_once_are_the_same() -> None:
    """An array of extra rows is only faster, and the shape's own rows count."""
    table = CostTable({step: truth(step) for step in GRID})
    extra = np.arange(200)
    many = table.seconds(shape(4, 4, 800), extra)
    assert many.tolist() == [table.seconds(shape(4, 4, 800), int(each)) for each in extra]


times = st.floats(min_value=1e-4, max_value=10)


@settings(max_examples=50, deadline=None)
@given(
    measured=st.dictionaries(st.integers(1, 300), times, min_size=1, max_size=8),
    observed=st.lists(st.tuples(st.integers(0, 400), times), max_size=30),
)
def test_more_rows_never_cost_less(
    measured: dict[int, float], observed: list[tuple[int, float]]
) -> None:
    """Whatever was measured and observed, also beyond all of it."""
    table = CostTable({shape(rows): seconds for rows, seconds in measured.items()})
    for extra, seconds in observed:
        table.observe(shape(1), extra, seconds)
    costs = table.seconds(shape(1), np.arange(1000))
    assert np.isfinite(costs).all()
    assert (costs > 0).all()
    assert (np.diff(costs) >= -1e-12 * costs[1:]).all()


def test_beyond_what_was_measured_rows_go_on_to_cost() -> None:
    """A flat end is no promise that all rows after it are free."""
    table = CostTable({shape(rows): 0.01 * rows for rows in (1, 8, 16)})
    assert table.seconds(shape(1600)) > 5


def test_a_machine_that_slows_down_is_followed_within_a_second_of_steps() -> None:
    """Half as fast from one step to the next: predicted to 10% after 40 steps of 25 ms."""
    table = CostTable({step: truth(step) for step in GRID})
    for _ in range(40):
        table.observe(shape(4, 4, 800), 4, 2 * truth(shape(8, 4, 800)))
    assert table.seconds(shape(4, 4, 800), 4) == pytest.approx(2 * truth(shape(8, 4, 800)), rel=0.1)
    assert table.drift == pytest.approx(2, rel=0.15)


def test_single_steps_that_take_ten_times_as_long_change_little() -> None:
    """One in fifty is such a step, and the prediction stays within 10%."""
    chances = random.Random(0)
    table = CostTable({step: truth(step) for step in GRID})
    worst = 0.0
    for step in range(500):
        extra = chances.randrange(9)
        seconds = truth(shape(4 + extra, 4, 800)) * math.exp(chances.gauss(0, 0.05))
        table.observe(shape(4, 4, 800), extra, seconds * (10 if step % 50 == 49 else 1))
        if step > 50:
            error = table.seconds(shape(4, 4, 800), 4) / truth(shape(8, 4, 800)) - 1
            worst = max(worst, abs(error))
    assert worst < 0.1


def test_a_guess_learns_the_scale_at_once_and_the_curve_soon() -> None:
    """Nothing was measured: after 300 steps every row count that was used is known to 15%."""
    chances = random.Random(1)
    table = CostTable.flat_guess()
    for _ in range(300):
        extra = chances.randrange(9)
        table.observe(shape(1), extra, 0.05 + 0.01 * extra)
    for extra in range(9):
        assert table.seconds(shape(1), extra) == pytest.approx(0.05 + 0.01 * extra, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_what_is_not_a_time_is_ignored(seconds: float) -> None:
    """A clock that jumped teaches nothing."""
    table = CostTable({shape(1): 0.01, shape(9): 0.02})
    before = table.seconds(shape(1), np.arange(9)).tolist()
    table.observe(shape(1), 2, seconds)
    assert table.seconds(shape(1), np.arange(9)).tolist() == before


def test_a_table_survives_json() -> None:
    """Stored and read again it says the same; corrections of the moment are left out."""
    table = CostTable({step: truth(step) for step in GRID})
    again = CostTable.from_json(json.loads(json.dumps(table.as_json())))
    assert again.points == table.points
    assert again.seconds(shape(9, 2, 77)) == table.seconds(shape(9, 2, 77))


def test_a_table_of_nothing_is_refused() -> None:
    """There is no time without a measurement; a guess has to be asked for."""
    with pytest.raises(ValueError, match="point"):
        CostTable({})


def test_draft_costs_are_learned_by_sequences_and_tokens() -> None:
    """A round trip, something for each sequence, and a pass for each position."""
    chances = random.Random(2)
    cost = DraftCost()
    for _ in range(300):
        sequences, depth = chances.randint(1, 8), chances.randint(1, 8)
        cost.observe(sequences, sequences * depth, 2e-3 + 1e-4 * sequences + 1.5e-3 * depth)
    for sequences, depth in ((1, 1), (4, 8), (8, 2)):
        expected = 2e-3 + 1e-4 * sequences + 1.5e-3 * depth
        assert cost.seconds(sequences, sequences * depth) == pytest.approx(expected, rel=0.1)


def test_asking_nobody_costs_nothing() -> None:
    """Also when asking is known to be dear."""
    cost = DraftCost()
    cost.observe(2, 8, 0.5)
    assert cost.seconds(0, 0) == 0.0
    assert cost.seconds(2, 8) > 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 16), st.integers(0, 64), st.floats(0, 5)), min_size=1, max_size=40
    )
)
def test_no_part_of_a_draft_cost_is_negative(seen: list[tuple[int, int, float]]) -> None:
    """So asking for more is never thought to save time."""
    cost = DraftCost()
    for sequences, tokens, seconds in seen:
        cost.observe(sequences, tokens, seconds)
    assert cost.fixed >= 0
    assert cost.per_sequence >= 0
    assert cost.per_token(4) >= 0
    assert cost.seconds(8, 64) >= cost.seconds(8, 8) >= cost.seconds(1, 1) >= 0
