"""Which drafts the target will keep, from what the drafter knew before it drew them.

The chance that a position is accepted, once all before it were, is
`sigmoid(w(x) + b + bias of the sequence)`, learned for every drafter by position. Only positions
that the chain reached and the target verified are labels, so that nothing is censored.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cluster.control.calibration import Calibration
from cluster.control.policy import Outcome
from cluster.control.table import SequenceTable
from cluster.messages import Draft

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Places in a draft that are taken as one: 0, 1, 2, 3, 4-5, 6-8, 9-15, 16 and on.
BUCKETS = np.repeat(np.arange(8), (1, 1, 1, 1, 2, 3, 7, 240))
NUM_BUCKETS = 8
NUM_SHARED = 3
NUM_FEATURES = NUM_SHARED + 2 * NUM_BUCKETS

PRIOR_INTERCEPT = 0.4  # somewhat hopeful: what is never tried is never learned
PRIOR_SLOPE = 0.3
INTERCEPT_PRECISION = 2.0
MAX_MARGIN = 16.0  # beyond it a lead counts by its logarithm only
MAX_LOGIT = 7.0
MAX_MOVE = 2.0
WINDOW = 1_000  # labels after which an old one counts a third

BIAS_VARIANCE = 1.0  # how much sequences differ, until some have ended
BIAS_SEQUENCES = 8.0  # that this guess counts for,
BIAS_SEQUENCES_MEAN = 2.0  # and the guess that on average they are as all labels together
BIAS_WINDOW = 256  # sequences
BIAS_KEPT = 0.98  # of what was known of a sequence, with every verified draft


class AcceptanceModel:
    """Survivals of draft positions, learned online; calibrated, and says how well."""

    def __init__(self) -> None:
        self._regressions: dict[str, _Regression] = {}
        self._sequences = SequenceTable(bias=np.array(0.0), information=np.array(0.0))
        self._calibration = Calibration()
        self._num_ended = 0.0
        self._ended_bias = 0.0
        self._ended_variance = 0.0

    @property
    def calibration_error(self) -> float:
        """Mean distance of predicted from observed survival over verified positions."""
        return self._calibration.error

    @property
    def num_calibrated(self) -> float:
        """Verified positions that the calibration error rests on."""
        return self._calibration.num_positions

    @property
    def num_sequences(self) -> int:
        """Sequences of which something is known."""
        return len(self._sequences)

    def survivals(self, seq_id: int, drafter: str, margins: Sequence[float]) -> tuple[float, ...]:
        """The chance of each position that it and all before it are accepted."""
        draft = Draft((0,) * len(margins), margins=tuple(margins), drafter=drafter)
        table = self.survival_table([seq_id], [draft])
        return tuple(float(survival) for survival in table[0])

    def observe(
        self,
        seq_id: int,
        drafter: str,
        margins: Sequence[float],
        num_accepted: int,
        num_verified: int,
    ) -> None:
        """Learn that of the first `num_verified` positions so many were accepted."""
        margins = tuple(margins)[:num_verified]
        draft = Draft((0,) * len(margins), margins=margins, drafter=drafter)
        self.learn([Outcome(seq_id=seq_id, draft=draft, num_accepted=num_accepted)])

    def survival_table(
        self, seq_ids: Sequence[int], drafts: Sequence[Draft], *, hope: float = 0.0
    ) -> FloatArray:
        """Survivals by draft and position `[drafts, longest]`; 0 after a draft's end.

        `hope` adds so many standard deviations of what is not known yet to the logit of each first
        position: decided by such survivals, what might be good is tried until it is known.
        """
        margins, offered = _margins(drafts)
        rows = self._sequences.rows(seq_ids)
        logits = self._logits(rows, drafts, margins)
        survivals = _chances(logits).cumprod(axis=1)
        if hope and margins.shape[1]:
            spreads = self._spreads(rows, drafts, margins[:, 0])
            survivals[:, 0] = _chances(logits[:, 0] + hope * spreads)
        survivals *= offered
        return np.asarray(survivals)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from verified drafts; empty ones say nothing."""
        outcomes = [outcome for outcome in outcomes if outcome.draft.token_ids]
        if not outcomes:
            return
        drafts = [outcome.draft for outcome in outcomes]
        margins, offered = _margins(drafts)
        rows = self._sequences.rows([outcome.seq_id for outcome in outcomes])
        num_accepted = np.array([outcome.num_accepted for outcome in outcomes])[:, None]
        positions = np.arange(margins.shape[1])
        accepted = positions < num_accepted
        reached = offered & (positions <= num_accepted)
        chances = _chances(self._logits(rows, drafts, margins))
        survivals = np.cumprod(chances, axis=1, dtype=np.float64)
        self._calibration.observe(survivals[offered], accepted[offered].astype(np.float64))
        for name, group in _by_drafter(drafts):
            labels = reached[group]
            self._regression(name).learn(
                margins[group][labels],
                np.broadcast_to(positions, labels.shape)[labels],
                (accepted[group] - chances[group])[labels],
                chances[group][labels],
            )
        chances = _chances(self._logits(rows, drafts, margins))
        self._learn_bias(rows, chances, accepted, reached)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Sequences ended; what they were like is what to expect of those to come."""
        known = [seq_id for seq_id in seq_ids if seq_id in self._sequences]
        rows = self._sequences.rows(known)
        biases, information = (self._sequences[name][rows] for name in ("bias", "information"))
        for bias, own in zip(biases.tolist(), information.tolist(), strict=True):
            if own > 0:
                self._learn_differences(bias, own)
        self._sequences.forget(known)

    def _learn_differences(self, bias: float, information: float) -> None:
        """How sequences differ: the mean of their biases, and how far they are from it."""
        kept = 1 - 1 / BIAS_WINDOW
        variance = (bias - self._mean_bias) ** 2 + 1 / (information + self._bias_precision)
        self._num_ended = kept * self._num_ended + 1
        self._ended_bias = kept * self._ended_bias + bias
        self._ended_variance = kept * self._ended_variance + variance
        self._sequences.initial["bias"] = np.array(self._mean_bias)

    @property
    def _mean_bias(self) -> float:
        return self._ended_bias / (self._num_ended + BIAS_SEQUENCES_MEAN)

    @property
    def _bias_precision(self) -> float:
        count = self._num_ended + BIAS_SEQUENCES
        return count / (self._ended_variance + BIAS_SEQUENCES * BIAS_VARIANCE)

    def _learn_bias(
        self,
        rows: IntArray,
        chances: FloatArray,
        accepted: NDArray[np.bool_],
        reached: NDArray[np.bool_],
    ) -> None:
        """One Newton step of each sequence's own bias, towards zero as far as little is known."""
        bias, information = self._sequences["bias"], self._sequences["information"]
        known = information[rows] * BIAS_KEPT + (chances * (1 - chances) * reached).sum(axis=1)
        surprise = ((accepted - chances) * reached).sum(axis=1)
        precision = self._bias_precision
        surprise -= (1 - BIAS_KEPT) * precision * (bias[rows] - self._mean_bias)
        information[rows] = known
        bias[rows] += np.clip(surprise / (known + precision), -MAX_MOVE, MAX_MOVE)

    def _logits(self, rows: IntArray, drafts: Sequence[Draft], margins: FloatArray) -> FloatArray:
        """Of the conditional acceptance of every position `[drafts, longest]`."""
        logits = np.empty_like(margins)
        for name, group in _by_drafter(drafts):
            logits[group] = self._regression(name).logits(margins[group])
        logits += self._sequences["bias"][rows, None]
        return logits

    def _spreads(self, rows: IntArray, drafts: Sequence[Draft], margins: FloatArray) -> FloatArray:
        """Standard deviations of what is not known of the logit of each first position."""
        variances = 1 / (self._bias_precision + self._sequences["information"][rows])
        for name, group in _by_drafter(drafts):
            variances[group] += self._regression(name).variances(margins[group])
        return np.asarray(np.sqrt(variances))

    def _regression(self, drafter: str) -> "_Regression":
        if drafter not in self._regressions:
            self._regressions[drafter] = _Regression()
        return self._regressions[drafter]


class _Regression:
    """A drafter's logistic regression, by Newton steps over labels that fade.

    Features: 1, log(1 + margin), the margin itself up to a bound; and for each bucket of places
    the first two again, held back by a stronger prior.
    """

    def __init__(self) -> None:
        self._prior = np.zeros(NUM_FEATURES)
        self._prior[:2] = PRIOR_INTERCEPT, PRIOR_SLOPE
        self._precision = np.repeat(
            (INTERCEPT_PRECISION, 1.0, 2.0, 4.0, 8.0), (1, 1, 1, NUM_BUCKETS, NUM_BUCKETS)
        )
        self._weights = self._prior.copy()
        self._information = np.zeros((NUM_FEATURES, NUM_FEATURES))
        self._spread = (1 / self._precision[0], 0.0, 1 / self._precision[1])

    def logits(self, margins: FloatArray) -> FloatArray:
        """By draft and position."""
        places = BUCKETS[: margins.shape[1]]
        intercepts, slopes = self._weights[NUM_SHARED:].reshape(2, NUM_BUCKETS)[:, places]
        shared, slope, lead = self._weights[:NUM_SHARED]
        logarithm, bounded = _features(margins)
        logarithm *= slopes + slope
        logarithm += intercepts + shared
        bounded *= lead
        logarithm += bounded
        return logarithm

    def variances(self, margins: FloatArray) -> FloatArray:
        """Of what is not known of the intercept and the first slope."""
        intercept, both, slope = self._spread
        logarithm, _ = _features(margins)
        return np.asarray((slope * logarithm + 2 * both) * logarithm + intercept)

    def learn(
        self, margins: FloatArray, positions: IntArray, surprises: FloatArray, chances: FloatArray
    ) -> None:
        """One step over labels, all flat; a surprise is what came minus its chance."""
        count = len(margins)
        labels = np.zeros((count, NUM_FEATURES))
        logarithm, bounded = _features(margins)
        places = BUCKETS[positions]
        each = np.arange(count)
        labels[:, 0] = 1
        labels[:, 1] = logarithm
        labels[:, 2] = bounded
        labels[each, NUM_SHARED + places] = 1
        labels[each, NUM_SHARED + NUM_BUCKETS + places] = logarithm
        kept = np.exp(-count / WINDOW)
        self._information *= kept
        self._information += labels.T @ (labels * (chances * (1 - chances))[:, None])
        gradient = labels.T @ surprises
        gradient -= (1 - kept) * self._precision * (self._weights - self._prior)
        covariance = np.linalg.inv(self._information + np.diag(self._precision))
        self._weights += np.clip(covariance @ gradient, -MAX_MOVE, MAX_MOVE)
        self._spread = (covariance[0, 0], covariance[0, 1], covariance[1, 1])


def _chances(logits: FloatArray) -> FloatArray:
    bounded = np.minimum(np.maximum(logits, -MAX_LOGIT), MAX_LOGIT)
    return np.asarray(1 / (1 + np.exp(-bounded)))


def _features(margins: FloatArray) -> tuple[FloatArray, FloatArray]:
    positive = np.maximum(margins, 0.0)
    return np.log1p(positive), np.minimum(positive, MAX_MARGIN) * (2 / MAX_MARGIN)


def _margins(drafts: Sequence[Draft]) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Margins and what is offered `[drafts, longest]`; a draft that says nothing has zeros."""
    lengths = list(map(len, [draft.token_ids for draft in drafts]))
    longest = max(lengths, default=0)
    told = [draft.margins for draft in drafts]
    if list(map(len, told)) != lengths:
        told = [
            each if len(each) == length else (0.0,) * length
            for each, length in zip(told, lengths, strict=True)
        ]
    flat = np.fromiter(chain.from_iterable(told), np.float64, sum(lengths))
    if lengths.count(longest) == len(lengths):
        margins = flat.reshape(len(lengths), longest)
        return margins, np.ones(margins.shape, dtype=np.bool_)
    offered = np.arange(longest) < np.array(lengths)[:, None]
    margins = np.zeros(offered.shape)
    margins[offered] = flat
    return margins, offered


def _by_drafter(drafts: Sequence[Draft]) -> list[tuple[str, slice | IntArray]]:
    """Where each drafter's drafts are; mostly there is one, and all are its."""
    names = [draft.drafter for draft in drafts]
    distinct = set(names)
    if len(distinct) == 1:
        return [(names[0], slice(None))]
    return [
        (name, np.array([at for at, other in enumerate(names) if other == name]))
        for name in sorted(distinct)
    ]
