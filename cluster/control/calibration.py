"""Whether what was predicted comes true."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

NUM_BINS = 10
WINDOW = 20_000  # verified positions after which an old one counts a third


class Calibration:
    """Predicted against observed survival of verified positions, by bins of the predicted."""

    def __init__(self) -> None:
        self._sums = np.zeros((3, NUM_BINS))  # positions, predicted and observed survivals

    def observe(self, predicted: FloatArray, survived: FloatArray) -> None:
        """Count positions; both arrays are flat, `survived` is 0 or 1."""
        bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        self._sums *= np.exp(-len(predicted) / WINDOW)
        for row, weights in enumerate((None, predicted, survived)):
            self._sums[row] += np.bincount(bins, weights, minlength=NUM_BINS)

    @property
    def error(self) -> float:
        """The expected calibration error: mean distance of the two, bins by their positions."""
        counts, predicted, observed = self._sums
        return float(np.abs(predicted - observed).sum() / max(counts.sum(), 1e-9))

    @property
    def num_positions(self) -> float:
        """How many positions that rests on."""
        return float(self._sums[0].sum())
