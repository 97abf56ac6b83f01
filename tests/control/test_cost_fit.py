"""The curve through measured times: bends where they show one, and not where they are noisy."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from cluster.control.cost import CostTable
from cluster.control.cost_fit import fit
from cluster.control.policy import StepShape

ROWS = sorted({count * each for count in (1, 2, 4, 8, 16, 32, 64) for each in (1, 2, 4, 9)})


def shape(num_rows: int) -> StepShape:
    """A step of so many rows."""
    return StepShape(num_sequences=1, num_rows=num_rows, num_context_tokens=100)


def measured(seconds: Callable[[int], float], *, seed: int) -> dict[StepShape, float]:
    """A profile that is 2% off, here more and there less."""
    chances = random.Random(seed)
    return {shape(rows): seconds(rows) * math.exp(chances.gauss(0, 0.02)) for rows in ROWS}


def straight(rows: int) -> float:
    """Every row costs the same."""
    return 2e-3 + 1e-3 * rows


def stairs(rows: int) -> float:
    """Tiles of 16 rows."""
    return 10e-3 + 3e-3 * math.ceil(rows / 16)


def bent(rows: int) -> float:
    """Dear at first, then flat, then dear."""
    return float(np.interp(rows, (1, 4, 16, 640), (10e-3, 16e-3, 17e-3, 0.4)))


@pytest.mark.parametrize("seed", range(8))
def test_noise_makes_no_bends(seed: int) -> None:
    """What decides is the difference from row to row: with few exceptions it is right to 10%."""
    curve = fit(measured(straight, seed=seed)).curve
    wrong = np.abs(np.diff(curve[1:]) / 1e-3 - 1)
    assert np.quantile(wrong, 0.9) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_bends_that_are_there_are_kept(seed: int) -> None:
    """A tenth more or less is no noise."""
    curve = fit(measured(bent, seed=seed)).curve
    for rows in (1, 2, 4, 8, 16, 64, 288):
        assert curve[rows] == pytest.approx(bent(rows), rel=0.08)


def test_tiles_are_found_though_few_of_their_edges_were_measured() -> None:
    """The first row of a tile pays for all of it, also where no time was taken; in most profiles.

    Without tiles none are found.
    """
    edges = [rows for rows in range(16, 280, 16) if rows + 1 not in ROWS]
    num_found = 0
    for seed in range(4):
        curve = fit(measured(stairs, seed=seed)).curve
        num_found += all(curve[rows + 1] - curve[rows] > 2.4e-3 for rows in edges)
        smooth = fit(measured(straight, seed=seed)).curve
        assert not all(smooth[rows + 1] - smooth[rows] > 1.5e-3 for rows in edges)
    assert num_found >= 3


def test_a_slow_step_does_not_bend_a_measured_curve() -> None:
    """Steps of few rows are seen most; outliers among the others do not make rows look dear."""
    chances = random.Random(3)
    table = CostTable({shape(rows): straight(rows) for rows in ROWS})
    for _ in range(1000):
        extra = min(int(chances.expovariate(1)), 8)
        seconds = straight(4 + extra) * math.exp(chances.gauss(0, 0.05))
        table.observe(shape(4), extra, seconds * (10 if chances.random() < 0.01 else 1))
    costs = table.rising(shape(4), 12) / table.drift
    assert np.diff(costs).mean() == pytest.approx(1e-3, rel=0.05)
    assert (costs[3:] - costs[:-3]) / 3e-3 == pytest.approx(1, rel=0.15)


def test_rising_is_what_every_number_of_rows_takes() -> None:
    """Only faster, also beyond what was measured."""
    table = CostTable({shape(rows): stairs(rows) for rows in ROWS})
    for num_rows in (1, 30, 600):
        own = shape(num_rows)
        assert table.rising(own, 50).tolist() == pytest.approx(
            [table.seconds(own, extra) for extra in range(51)]
        )
