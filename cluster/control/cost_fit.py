"""A curve and slopes through measured times of steps: with no more bends than they show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.control.policy import StepShape

FloatArray = NDArray[np.float64]

MIN_SECONDS = 1e-7
SWEEPS = 400
PRECISION = 1e-6  # of a solution, at which no more sweeps are made
TOLERANCE = 0.05  # of a measured time: a bend that is smaller is noise,
USUAL_MISS = 0.022  # unless they are so large on average (the square root of the mean square)
LEAST_MISS = 0.02  # what is missed by less is noise, and no merit of a fit
TILES = (8, 16, 32, 64, 128)  # rows that are computed together, if any
EVIDENCE = 2.0  # of tiles, in nats of likelihood twice


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds by rows from 0 to the most measured, and slopes.

    The slopes are seconds per sequence, per token of context, and per row times mean context.
    `num_terms` were needed for the curve.
    """

    curve: FloatArray
    slopes: tuple[float, float, float]
    num_terms: int
    usual_miss: float


def fit(points: Mapping[StepShape, float]) -> Fit:
    """Least squares, relative to what was measured; tiles if they explain it much better.

    The curve bends only where otherwise it would miss what was measured by TOLERANCE: measured
    times are noisy, and what decides are their differences from row to row.
    """
    smooth = _fit(points, tile=None)
    count = len({shape.num_rows for shape in points})
    best = min((_fit(points, tile=tile) for tile in TILES), key=lambda each: _badness(each, count))
    return best if _badness(best, count) < _badness(smooth, count) - EVIDENCE else smooth


def _badness(found: Fit, count: int) -> float:
    """The Bayesian information criterion."""
    miss = max(found.usual_miss, LEAST_MISS)
    return 2 * count * math.log(miss) + found.num_terms * math.log(count)


def _fit(points: Mapping[StepShape, float], *, tile: int | None) -> Fit:
    rows = np.array([shape.num_rows for shape in points], dtype=np.float64)
    seconds = np.maximum(list(points.values()), MIN_SECONDS)
    linear = _linear(points, rows)
    measured, place = np.unique(rows, return_inverse=True)
    knots = measured[[0, -1]] if len(measured) > 1 else measured
    while True:
        rises = _rises(rows, knots, tile)
        solved = _non_negative(np.concatenate([rises, linear], axis=1) / seconds[:, None])
        num_rises = rises.shape[1]
        misses = rises @ solved[:num_rises] + linear @ solved[num_rises:]
        misses = np.abs(np.bincount(place, misses / seconds - 1) / np.bincount(place))
        usual = math.sqrt(np.mean(misses**2))
        misses[np.isin(measured, knots)] = 0.0
        worst = int(misses.argmax())
        if misses[worst] <= (TOLERANCE if usual <= USUAL_MISS else 0.0):
            break
        knots = np.sort(np.append(knots, measured[worst]))
    curve = _rises(np.arange(knots[-1] + 1), knots, tile) @ solved[:num_rises]
    sequence, per_context, row_context = (float(slope) for slope in solved[num_rises:])
    return Fit(curve, (sequence, per_context, row_context), num_rises, usual)


def _linear(points: Mapping[StepShape, float], rows: FloatArray) -> FloatArray:
    """Sequences, context, and rows times mean context, `[points, 3]`."""
    sequences = np.array([shape.num_sequences for shape in points], dtype=np.float64)
    context = np.array([shape.num_context_tokens for shape in points], dtype=np.float64)
    linear = np.stack([sequences, context, rows * context / np.maximum(sequences, 1)], axis=1)
    for column in range(linear.shape[1]):
        if np.ptp(linear[:, column]) == 0:
            linear[:, column] = 0  # never varied: the curve holds it
    return linear


def _rises(rows: FloatArray, knots: FloatArray, tile: int | None) -> FloatArray:
    """How much of the rise to each knot `[points, knots]` lies below so many rows; and tiles.

    Each rise is an unknown that cannot be negative, which makes the curve monotone.
    """
    columns = [np.ones((len(rows), 1))]
    if len(knots) > 1:
        parts = (rows[:, None] - knots[None, :-1]) / np.diff(knots)
        columns.append(np.clip(parts, 0.0, 1.0))
    if tile:
        columns.append(np.ceil(rows / tile)[:, None])
    return np.concatenate(columns, axis=1)


def _non_negative(columns: FloatArray) -> FloatArray:
    """The x of no negative entry with columns @ x nearest to 1, by coordinate descent."""
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    columns = columns / scale
    gram = columns.T @ columns
    wanted = columns.sum(axis=0)
    solved = np.zeros(columns.shape[1])
    for _ in range(SWEEPS):
        before = solved.copy()
        for index in range(len(solved)):
            if gram[index, index] > 0:
                step = (wanted[index] - gram[index] @ solved) / gram[index, index]
                solved[index] = max(solved[index] + step, 0.0)
        if np.abs(solved - before).max() <= PRECISION:
            break
    return np.asarray(solved / scale)
