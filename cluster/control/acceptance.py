"""Which drafts the target will keep, from what the drafter knew before it drew them.

The chance that a position is accepted, once all before it were, is
`sigmoid(w(x) + b + bias of the sequence)`, learned for every drafter by position. Only positions
that the chain reached and the target verified are labels, so that nothing is censored.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from struct import pack

import numpy as np
from numpy.typing import NDArray

from cluster.control.calibration import Calibration
from cluster.control.kernels import conditional, newton, survive
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
        self._drafters: dict[str, int] = {}
        self._regressions: list[_Regression] = []
        self._sequences = SequenceTable(bias=np.array(0.0), information=np.array(0.0))
        self._calibration = Calibration()
        self._num_ended = 0.0
        self._ended_bias = 0.0
        self._ended_variance = 0.0
        self._stack()

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
        return self.survival_of(seq_ids, self.told(drafts), hope=hope)

    def told(self, drafts: Sequence[Draft]) -> "Told":
        """What is known of these drafts, side by side."""
        return Told(drafts, self._place)

    def survival_of(self, seq_ids: Sequence[int], told: "Told", *, hope: float = 0.0) -> FloatArray:
        """As `survival_table`."""
        rows = self._sequences.rows(seq_ids)
        biases, known = (self._sequences[name][rows] for name in ("bias", "information"))
        prior = self._bias_precision
        survivals = np.empty((len(rows), told.longest))
        survive(*told.flat, biases, *self._weights, known, prior, self._spreads, hope, survivals)
        return survivals

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from verified drafts; empty ones say nothing."""
        outcomes = [outcome for outcome in outcomes if outcome.draft.token_ids]
        if not outcomes:
            return
        told = self.told([outcome.draft for outcome in outcomes])
        seq_ids = [outcome.seq_id for outcome in outcomes]
        rows = self._sequences.rows(seq_ids)
        num_accepted = np.array([outcome.num_accepted for outcome in outcomes])
        offered = np.arange(told.longest) < told.lengths[:, None]
        drafts, places = offered.nonzero()
        accepted = places < num_accepted[drafts]
        reached = places <= num_accepted[drafts]
        chances = self._chances(told, rows)
        survivals = self.survival_of(seq_ids, told)
        self._calibration.observe(survivals[offered], accepted.astype(np.float64))
        for own in set(told.own.tolist()):
            labels = reached & (told.own[drafts] == own)
            self._regressions[own].learn(
                told.margins[labels],
                places[labels],
                (accepted - chances)[labels],
                chances[labels],
            )
        self._stack()
        chances = self._chances(told, rows)
        self._learn_bias(rows, drafts[reached], chances[reached], accepted[reached])

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
        self, rows: IntArray, drafts: IntArray, chances: FloatArray, accepted: NDArray[np.bool_]
    ) -> None:
        """One Newton step of each sequence's own bias, towards zero as far as little is known.

        `chances` are of labels, which are of `drafts`, whose sequences are in `rows`.
        """
        bias, information = self._sequences["bias"], self._sequences["information"]
        known = information[rows] * BIAS_KEPT
        known += np.bincount(drafts, chances * (1 - chances), minlength=len(rows))
        precision = self._bias_precision
        faded = (1 - BIAS_KEPT) * precision * (bias[rows] - self._mean_bias)
        surprise = np.bincount(drafts, accepted - chances, minlength=len(rows)) - faded
        information[rows] = known
        bias[rows] += np.clip(surprise / (known + precision), -MAX_MOVE, MAX_MOVE)

    def _chances(self, told: "Told", rows: IntArray) -> FloatArray:
        """Of all positions, flat, that they are accepted once all before them were."""
        chances = np.empty_like(told.margins)
        conditional(*told.flat, self._sequences["bias"][rows], *self._weights, chances)
        return chances

    def _place(self, drafter: str) -> int:
        """Which regression is that drafter's."""
        if drafter not in self._drafters:
            self._drafters[drafter] = len(self._regressions)
            self._regressions.append(_Regression())
            self._stack()
        return self._drafters[drafter]

    def _stack(self) -> None:
        """Put side by side what the regressions have learned."""
        each = self._regressions
        self._weights = (
            np.array([one.intercepts for one in each]).reshape(-1, len(BUCKETS)),
            np.array([one.slopes for one in each]).reshape(-1, len(BUCKETS)),
            np.array([one.lead for one in each]),
        )
        self._spreads = np.array([one.spread for one in each]).reshape(-1, 3)


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
        self.spread = np.array([1 / self._precision[0], 0.0, 1 / self._precision[1]])
        self._place_weights()

    def learn(
        self, margins: FloatArray, positions: IntArray, surprises: FloatArray, chances: FloatArray
    ) -> None:
        """One step over labels, all flat; a surprise is what came minus its chance."""
        newton(
            margins,
            BUCKETS[positions],
            surprises,
            chances,
            float(np.exp(-len(margins) / WINDOW)),
            MAX_MOVE,
            self._prior,
            self._precision,
            self._information,
            self._weights,
            self.spread,
        )
        self._place_weights()

    def _place_weights(self) -> None:
        """The weights of each place in a draft."""
        own = self._weights[NUM_SHARED:].reshape(2, NUM_BUCKETS) + self._weights[:2, None]
        self.intercepts, self.slopes = own[:, BUCKETS]
        self.lead = float(self._weights[2])


class Told:
    """What drafters told of some drafts; of one that says nothing the margins count as zeros.

    `flat` is the margins of all positions, draft after draft, the drafts' lengths, and which
    regression is each one's drafter's.
    """

    def __init__(self, drafts: Sequence[Draft], regression: Callable[[str], int]) -> None:
        lengths = list(map(len, [draft.token_ids for draft in drafts]))
        told = [draft.margins for draft in drafts]
        if list(map(len, told)) != lengths:
            told = [
                each if len(each) == length else (0.0,) * length
                for each, length in zip(told, lengths, strict=True)
            ]
        self.longest = max(lengths, default=0)
        packed = pack(f"{sum(lengths)}d", *chain.from_iterable(told))  # half of fromiter's time
        self.margins = np.maximum(np.frombuffer(packed), 0.0)
        self.lengths = np.fromiter(lengths, np.int64, len(lengths))
        names = [draft.drafter for draft in drafts]
        places = {name: regression(name) for name in dict.fromkeys(names)}
        self.own = np.fromiter(map(places.__getitem__, names), np.int64, len(names))
        self.flat = self.margins, self.lengths, self.own
