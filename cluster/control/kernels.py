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
