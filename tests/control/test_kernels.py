"""The compiled sums, against the same written with numpy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.kernels import MAX_MARGIN, bend, newton, shape_curve

NUM_BUCKETS = 8
SIZE = 3 + 2 * NUM_BUCKETS


@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.floats(0.5, 1.0))
def test_a_newton_step_is_that_of_linear_algebra(seed: int, count: int, kept: float) -> None:
    random = np.random.default_rng(seed)
    margins, buckets = random.gamma(2.0, 4.0, count), random.integers(0, NUM_BUCKETS, count)
    surprises, chances = random.normal(0, 1, count), random.uniform(0.01, 0.99, count)
    prior, precision = random.normal(size=SIZE), random.uniform(0.5, 8.0, SIZE)
    weights, factor = random.normal(size=SIZE), random.normal(size=(SIZE, SIZE))
    information = factor @ factor.T
    labels = np.zeros((count, SIZE))
    each = np.arange(count)
    labels[:, 0], labels[:, 1] = 1, np.log1p(margins)
    labels[:, 2] = np.minimum(margins, MAX_MARGIN) * 2 / MAX_MARGIN
    labels[each, 3 + buckets], labels[each, 3 + NUM_BUCKETS + buckets] = 1, np.log1p(margins)
    expected = kept * information + labels.T @ (labels * (chances * (1 - chances))[:, None])
    gradient = labels.T @ surprises - (1 - kept) * precision * (weights - prior)
    covariance = np.linalg.inv(expected + np.diag(precision))
    moved = weights + np.clip(covariance @ gradient, -2.0, 2.0)
    spread = np.zeros(3)
    newton(
        *(margins, buckets, surprises, chances, kept, 2.0),
        *(prior, precision, information, weights, spread),
    )
    np.testing.assert_allclose(information, expected, atol=1e-9)
    np.testing.assert_allclose(weights, moved, atol=1e-7)
    np.testing.assert_allclose(
        spread, (covariance[0, 0], covariance[0, 1], covariance[1, 1]), atol=1e-9
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(0, 80), st.integers(1, 32))
def test_a_curve_is_bent_near_what_was_seen(
    seed: int, size: int, num_rows: int, reach: int
) -> None:
    random = np.random.default_rng(seed)
    values, weights = random.normal(size=size), random.uniform(1, 9, size)
    expected = values.copy()
    place = min(num_rows, size - 1)
    width = place // reach
    for rows in range(1, size):
        distance = abs(rows - place)
        if distance <= width:
            weight = 1 - distance / (width + 1)
            expected[rows] += max(weight / (weights[rows] + weight), 0.01 * weight) * 0.3
    bend(values, weights, num_rows, reach, 0.3, 0.01)
    np.testing.assert_allclose(values, expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_a_corrected_curve_never_falls(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    parts = [random.normal(size=size) for _ in range(3)]
    curve = np.exp(sum(parts))
    reached = np.maximum.accumulate(curve)
    never_over = np.minimum.accumulate(curve[::-1])[::-1]
    out = np.empty(size)
    shape_curve(*parts, out)
    np.testing.assert_allclose(out, (reached + never_over) / 2)
    assert (np.diff(out) >= 0).all()
