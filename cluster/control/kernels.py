"""The sums over all positions of a step's drafts, compiled: a step must not wait for them.

Positions are flat, draft after draft; `own[draft]` is whose regression it is drafted by.
"""

import numpy as np
from numba import float64, int64, void

from cluster.jit import inner, kernel

MAX_MARGIN = 16.0  # beyond it a lead counts by its logarithm only
MAX_LOGIT = 7.0

flat, table = float64[::1], float64[:, ::1]
counts = int64[::1]


@inner
def _chance(logit):
    return 1 / (1 + np.exp(-min(max(logit, -MAX_LOGIT), MAX_LOGIT)))


@inner
def _logit(margin, place, own, intercepts, slopes, leads):
    """Before the sequence's own bias."""
    lead = min(margin, MAX_MARGIN) * (2 / MAX_MARGIN)
    return intercepts[own, place] + slopes[own, place] * np.log1p(margin) + leads[own] * lead


@kernel(void(flat, counts, counts, flat, table, table, flat, flat))
def conditional(margins, lengths, own, biases, intercepts, slopes, leads, out):
    """The chance of each position that it is accepted once all before it were."""
    at = 0
    for draft in range(len(lengths)):
        for place in range(lengths[draft]):
            logit = _logit(margins[at], place, own[draft], intercepts, slopes, leads)
            out[at] = _chance(logit + biases[draft])
            at += 1


@kernel(void(flat, counts, counts, flat, table, table, flat, flat, float64, table, float64, table))
def survive(
    margins, lengths, own, biases, intercepts, slopes, leads, known, prior, spreads, hope, out
):
    """Survivals by draft and position; 0 after a draft's end.

    Of each first position with `hope` times what is not known of its logit: of the sequence's bias
    by the information there is (`known` and `prior`), of the regression's intercept and slope by
    its row of `spreads`.
    """
    at = 0
    for draft in range(len(lengths)):
        survival = 1.0
        for place in range(lengths[draft]):
            margin, whose = margins[at], own[draft]
            logit = _logit(margin, place, whose, intercepts, slopes, leads) + biases[draft]
            survival *= _chance(logit)
            out[draft, place] = survival
            if place == 0 and hope:
                intercept, both, slope = spreads[whose]
                logarithm = np.log1p(margin)
                unknown = (slope * logarithm + 2 * both) * logarithm + intercept
                unknown += 1 / (prior + known[draft])
                out[draft, 0] = _chance(logit + hope * np.sqrt(unknown))
            at += 1
        out[draft, lengths[draft] :] = 0.0


@kernel(void(flat, counts, flat, flat, float64, float64, flat, flat, table, flat, flat))
def newton(
    margins, buckets, surprises, chances, kept, most, prior, precision, information, weights, spread
):
    """One Newton step of a logistic regression over labels, all flat.

    Old labels are `kept` in part, weights move by `most` at most. `spread` gets what is not known
    of intercept and slope: their variances, and between them their covariance.
    """
    size = len(weights)
    num_buckets = (size - 3) // 2
    gradient = -(1 - kept) * precision * (weights - prior)
    matrix = np.empty((size, 2 * size))
    for row in range(size):
        for column in range(size):
            information[row, column] *= kept
    places = np.empty(5, dtype=np.int64)
    features = np.empty(5)
    for label in range(len(margins)):
        logarithm = np.log1p(margins[label])
        first = 3 + buckets[label]
        places[:] = (0, 1, 2, first, first + num_buckets)
        lead = min(margins[label], MAX_MARGIN) * (2 / MAX_MARGIN)
        features[:] = (1.0, logarithm, lead, 1.0, logarithm)
        weight = chances[label] * (1 - chances[label])
        for one in range(5):
            gradient[places[one]] += features[one] * surprises[label]
            for other in range(5):
                product = weight * features[one] * features[other]
                information[places[one], places[other]] += product
    for row in range(size):  # beside the unit matrix, which becomes the inverse
        matrix[row, :size] = information[row]
        matrix[row, size:] = 0.0
        matrix[row, row] += precision[row]
        matrix[row, size + row] = 1.0
    for pivot in range(size):  # of a positive definite matrix any order of pivots will do
        matrix[pivot] /= matrix[pivot, pivot]
        for row in range(size):
            if row != pivot and matrix[row, pivot] != 0.0:
                matrix[row] -= matrix[row, pivot] * matrix[pivot]
    for row in range(size):
        move = 0.0
        for column in range(size):
            move += matrix[row, size + column] * gradient[column]
        weights[row] += min(max(move, -most), most)
    spread[0], spread[1], spread[2] = matrix[0, size], matrix[0, size + 1], matrix[1, size + 1]


@kernel(void(flat, flat, int64, int64, float64, float64))
def bend(values, weights, num_rows, reach, error, least):
    """Move means of errors by rows towards one that was seen at `num_rows`, and near it.

    `weights` are those of what was seen so far, `least` what a new one counts for at least.
    """
    most = len(values) - 1
    num_rows = min(num_rows, most)
    width = num_rows // reach
    for rows in range(max(num_rows - width, 1), min(num_rows + width, most) + 1):
        weight = 1 - abs(rows - num_rows) / (width + 1)
        weights[rows] += weight
        values[rows] += max(weight / weights[rows], least * weight) * error


@kernel(void(flat, flat, flat, flat))
def shape_curve(base, far, near, out):
    """A corrected curve, monotone: between what it never exceeds and what it has reached."""
    size = len(out)
    for rows in range(size):
        out[rows] = np.exp(base[rows] + far[rows] + near[rows])
    reached = np.empty(size)
    highest = 0.0
    for rows in range(size):
        highest = max(highest, out[rows])
        reached[rows] = highest
    lowest = np.inf
    for rows in range(size - 1, -1, -1):
        lowest = min(lowest, out[rows])
        out[rows] = (reached[rows] + lowest) / 2


@kernel(void(table, flat, flat, float64, counts))
def take_best(values, rising, costs, goodput, out):
    """How many first positions of each draft to take, of `values` that never rise along it.

    `rising` is all values in order. Of those that are equal the earlier drafts' come first.
    """
    out[:] = 0
    size = len(rising)
    taken, total, most = 0, 0.0, -goodput * costs[0]
    for count in range(1, size + 1):
        total += rising[size - count]
        net = total - goodput * costs[count]
        if net > most:
            taken, most = count, net
    if not taken:
        return
    last = rising[size - taken]
    level = taken  # how many of the last value are taken
    for draft in range(len(values)):
        for value in values[draft]:
            if value <= last:
                break
            out[draft] += 1
            level -= 1
    for draft in range(len(values)):
        for value in values[draft, out[draft] :]:
            if value != last or not level:
                break
            out[draft] += 1
            level -= 1
