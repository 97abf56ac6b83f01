"""What a target step costs: measured before, and corrected by every step that is made."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from cluster.control.cost_fit import MIN_SECONDS, fit
from cluster.control.kernels import bend, shape_curve
from cluster.control.policy import StepShape

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

AXES = ("num_sequences", "num_rows", "num_context_tokens")
GUESSED_SECONDS = 0.03
GUESSED_SLOPE = 0.01  # of one row, per row: low, so that drafting is tried and the truth seen
GUESSED_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

DRIFT_RATE = 0.15  # the machine as a whole: 50% within a minute, and back
SHAPE_RATE = 0.01  # how rows compare: once known it hardly changes
DRIFT_CLIP = 0.25  # of a log ratio: one step that took ten times as long moves all by 4%
SHAPE_CLIP = 0.5
MEASURED_CLIP = 0.1  # where the curve is known from the start
NUM_COMPARED = 7  # last steps: their median is what the machine does now, one slow step or not
MEASURED_WEIGHT = 6.0  # observed steps that a measured point stands for
GUESSED_WEIGHT = 0.5
FAR = 2  # an observed step says something of steps with so little part more rows,
NEAR = 32  # and slowly more of those about as large
NEAR_PATIENCE = 5.0


class CostTable:
    """Seconds of a target step by rows, sequences and context; never falls with more rows.

    It is a curve over rows, and three slopes: per sequence, per token of context, and per row
    times mean context. Every observed step moves two corrections in log space: one of the whole
    (`drift`), fast, and one of the curve where the step lies, slow. What a single step can move is
    bounded, so that an outlier does no harm, and a step up is followed within seconds.
    """

    def __init__(
        self, points: Mapping[StepShape, float], *, weight: float = MEASURED_WEIGHT
    ) -> None:
        """Fit to (median) seconds by the shape of all that a step holds.

        `weight` is how many observed steps each point stands for.

        Measure on both sides of where the time jumps (multiples of a tile). Raises ValueError
        without points.
        """
        self._points = dict(points)
        if not self._points:
            raise ValueError("a cost table needs a point")
        self._weight = weight
        self._drift = 0.0
        self._last_errors: deque[float] = deque([0.0], maxlen=NUM_COMPARED)
        self._num_observed = 0
        found = fit(self._points)
        curve, self._slopes = found.curve, found.slopes
        if weight >= 1:
            weight *= len(self._points) / found.num_terms  # what lies between knots stands for all
        self._base = np.log(np.maximum(curve, MIN_SECONDS))
        self._far = _Corrections(len(curve), reach=FAR, weight=weight)
        self._near = _Corrections(len(curve), reach=NEAR, weight=NEAR_PATIENCE * weight)
        self._curve = curve
        self._shape_curve()

    @classmethod
    def flat_guess(cls) -> Self:
        """For when nothing was measured: nearly flat, and forgotten as soon as steps are seen."""
        return cls(
            {
                StepShape(num_sequences=1, num_rows=num_rows, num_context_tokens=0): (
                    GUESSED_SECONDS * (1 + GUESSED_SLOPE * num_rows)
                )
                for num_rows in GUESSED_KNOTS
            },
            weight=GUESSED_WEIGHT,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The table that `as_json` described. Raises KeyError, TypeError or ValueError."""
        return cls(
            {
                StepShape(**{name: int(point[name]) for name in AXES}): float(point["seconds"])
                for point in data["points"]
            },
            weight=float(data["weight"]),
        )

    def as_json(self) -> dict[str, Any]:
        """The measured points; corrections are of the moment, and not kept."""
        return {
            "weight": self._weight,
            "points": [
                {name: getattr(shape, name) for name in AXES} | {"seconds": seconds}
                for shape, seconds in self._points.items()
            ],
        }

    @property
    def points(self) -> Mapping[StepShape, float]:
        """As measured."""
        return self._points

    @property
    def drift(self) -> float:
        """How much longer steps take now than when they were measured, as a factor."""
        return math.exp(self._drift)

    @overload
    def seconds(self, shape: StepShape, extra_rows: int = 0) -> float: ...

    @overload
    def seconds(self, shape: StepShape, extra_rows: IntArray) -> FloatArray: ...

    def seconds(self, shape: StepShape, extra_rows: int | IntArray = 0) -> float | FloatArray:
        """What a step of that shape and so many rows more will take."""
        rows = np.asarray(shape.num_rows + extra_rows)
        last = len(self._curve) - 1
        curve = self._curve[np.minimum(rows, last)]
        beyond = np.maximum(rows - last, 0)
        sequence, context, row_context = self._slopes
        mean_context = shape.num_context_tokens / max(shape.num_sequences, 1)
        linear = sequence * shape.num_sequences + context * shape.num_context_tokens
        seconds = (
            curve + self._last_slope * beyond + (linear + row_context * mean_context * rows)
        ) * self.drift
        return float(seconds) if isinstance(extra_rows, int) else seconds

    def rising(self, shape: StepShape, num_extra_rows: int) -> FloatArray:
        """What a step of that shape takes with 0, 1, ... rows more, up to so many."""
        first, end = shape.num_rows, shape.num_rows + num_extra_rows + 1
        if end > len(self._curve):
            return self.seconds(shape, np.arange(num_extra_rows + 1))
        sequence, context, row_context = self._slopes
        mean_context = shape.num_context_tokens / max(shape.num_sequences, 1)
        linear = sequence * shape.num_sequences + context * shape.num_context_tokens
        seconds = self._curve[first:end] + linear
        if row_context:
            seconds += row_context * mean_context * np.arange(first, end)
        seconds *= self.drift
        return seconds

    def observe(self, shape: StepShape, num_extra_rows: int, seconds: float) -> None:
        """Learn from a step that took so long. What is not a time is ignored."""
        if not 0 < seconds < math.inf:
            return
        error = math.log(seconds / self.seconds(shape, num_extra_rows))
        self._num_observed += 1
        if self._num_observed == 1 and self._weight < 1:
            self._drift += error  # a guess has no scale of its own
            return
        self._drift += DRIFT_RATE * max(-DRIFT_CLIP, min(DRIFT_CLIP, error))
        self._last_errors.append(error)
        contrast = error - median(
            self._last_errors
        )  # what is as wrong for all rows is the machine's
        clip = SHAPE_CLIP if self._weight < 1 else MEASURED_CLIP
        contrast = max(-clip, min(clip, contrast))
        self._far.bend(shape.num_rows + num_extra_rows, contrast)
        self._near.bend(shape.num_rows + num_extra_rows, contrast)
        self._shape_curve()

    def _shape_curve(self) -> None:
        """The corrected curve."""
        curve = np.empty_like(self._base)
        shape_curve(self._base, self._far.values, self._near.values, curve)
        self._curve = curve
        half = len(curve) // 2
        self._last_slope = float(max(curve[-1] - curve[half], 0) / max(len(curve) - 1 - half, 1))


class _Corrections:
    """Of the curve's logarithm, by rows: means of the errors seen near, that of old ones fading."""

    def __init__(self, num_rows: int, *, reach: int, weight: float) -> None:
        self.values = np.zeros(num_rows)
        self._weights = np.full(num_rows, weight)
        self._reach = reach

    def bend(self, num_rows: int, error: float) -> None:
        """Move the curve around so many rows; beyond all that was measured, its end."""
        bend(self.values, self._weights, num_rows, self._reach, error, SHAPE_RATE)
