"""How far to guess, for every sequence at every step: as far as it pays.

choose   looks at what each sequence's last drafts were worth at today's price of a row and of a
         draft, and asks those of which more is expected than asking costs
admit    sorts all positions that came by their survival (times the request's weight), and takes
         as many as bring more tokens than their time would bring otherwise
observe  takes note of what became of a step
learn    corrects by it what is known of costs and of acceptance, while the next step is computed

A sequence that does not pay is tried again after 8, 16, 32, ... tokens, and now and then a draft
is verified whole to learn from it; both from a credit of at most half a hundredth of the time.
What its drafts look like is seen more often, since asking may cost next to nothing. Drafting as
a whole begins or ends at most once a second.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from cluster.control.acceptance import AcceptanceModel
from cluster.control.cost import CostTable
from cluster.control.decision import Decision, DecisionLog
from cluster.control.draft_cost import DraftCost
from cluster.control.explorer import Explorer
from cluster.control.long_run import LongRun
from cluster.control.metrics import PolicyMetrics
from cluster.control.optimum import admitted
from cluster.control.outlook import Lookout, Outlook
from cluster.control.policy import Candidate, StepRecord, StepShape
from cluster.control.prospects import Prospects
from cluster.control.regime import Reason, Regime
from cluster.messages import NO_DRAFT, Draft

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

logger = logging.getLogger(__name__)

NUM_WHOLE = 2  # first drafts of a sequence that are verified whole, if that can be afforded
WHOLE_EVERY = 64  # steps, in one of which a draft of some sequence is
LOOK_SHARE = 0.002  # of the time: what is spent on asking one that does not pay
LEAST_PATIENCE_SECONDS = 0.005
HOPE = 0.5  # standard deviations of what is not known of a draft's chances
USUAL_WAITS = 3.0  # so many times the usual wait is no reason to give up
NOBODY = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class _Asked:
    """What `choose` asked for in a step, for `admit` and `observe`."""

    seq_ids: list[int]
    rows: IntArray
    weights: FloatArray
    counts: IntArray
    probed: BoolArray
    goodput: float
    draft_seconds: float  # that this should take
    asked_at: float
    survivals: FloatArray | None = None  # of what came
    late: bool = False


class AdaptivePolicy:
    """Maximises goodput. `num_speculative_tokens` is the most that is asked for a sequence.

    `trims` says whether drafts may be cut once they are there (not so under Rule.RATIO). All
    waiting is measured with `clock`, in seconds.
    """

    def __init__(
        self,
        cost: CostTable,
        *,
        num_speculative_tokens: int,
        trims: bool = True,
        metrics: PolicyMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.price_floor = 0.0
        self._cost = cost
        self._cap = num_speculative_tokens
        self._trims = trims
        self._metrics = metrics or PolicyMetrics(CollectorRegistry(), model="")
        self._clock = clock
        self._acceptance = AcceptanceModel()
        self._draft_cost = DraftCost()
        self._long_run = LongRun()
        self._prospects = Prospects(num_speculative_tokens)
        self._regime = Regime()
        self._explorer = Explorer()
        self._asked: _Asked | None = None
        self._noted: tuple[StepRecord, _Asked | None] | None = None
        self._lookout = Lookout(
            self._prospects,
            cost=cost,
            draft_cost=self._draft_cost,
            long_run=self._long_run,
            trims=trims,
        )
        self._blocked = Reason.ACCEPTANCE
        self._price = 0.0
        self._goodput = 0.0
        self._patience = LEAST_PATIENCE_SECONDS
        self._step = 0
        self._log = DecisionLog()
        self._metrics.watch(
            price=lambda: self._price,
            goodput=lambda: self._goodput,
            drift=lambda: cost.drift,
            draft_seconds=lambda: self._draft_cost.fixed,
            calibration_error=lambda: self._acceptance.calibration_error,
        )

    @property
    def price(self) -> float:
        """The survival below which a draft position does not pay now."""
        return self._price

    @property
    def patience_seconds(self) -> float:
        """How long waiting for this step's drafts costs less than they should bring."""
        return self._patience

    @property
    def calibration_error(self) -> float:
        """Mean distance of predicted from observed survival."""
        return self._acceptance.calibration_error

    @property
    def num_calibrated(self) -> float:
        """Verified positions that the calibration error rests on."""
        return self._acceptance.num_calibrated

    @property
    def drafting(self) -> bool:
        """Whether drafting as a whole is thought to pay."""
        return self._regime.drafting

    @property
    def num_sequences(self) -> int:
        """Sequences of which something is kept."""
        return max(len(self._prospects), self._acceptance.num_sequences)

    def explain(self) -> tuple[Decision, ...]:
        """The last decisions, oldest first."""
        return self._log.last

    def choose(self, candidates: Sequence[Candidate], shape: StepShape) -> Mapping[int, int]:
        """Full drafts where they are free, else as long as they should pay; nothing if none do."""
        self._asked = None
        if not candidates or not self._cap:
            return {}
        self._step += 1
        seq_ids = [each.seq_id for each in candidates]
        num_tokens = np.array([each.num_tokens for each in candidates])
        rows = self._prospects.rows(seq_ids)
        outlook = self._lookout.outlook(candidates, shape, rows=rows, step=self._step)
        self._explorer.earn(outlook.step_seconds, len(candidates))
        self._price = max(outlook.price, self.price_floor)
        self._settle_regime(outlook)
        if outlook.all_pay and self._regime.drafting:
            self._prospects.asked(rows, num_tokens)
            return self._ask(outlook, seq_ids, rows, outlook.wanted, ~outlook.pays)
        asked = outlook.pays & self._regime.drafting
        counts = np.where(asked, outlook.wanted, 0)
        self._prospects.asked(rows[asked], num_tokens[asked])
        probed = self._try_others(outlook, rows, num_tokens, asked, counts)
        return self._ask(outlook, seq_ids, rows, counts, probed)

    def admit(self, drafts: Mapping[int, Draft], shape: StepShape) -> Mapping[int, int]:
        """The positions that are worth their time, and drafts to learn from as whole ones."""
        asked = self._asked
        if asked is None:
            return {}
        if not drafts:
            self._nothing_came(asked)
            return {}
        came = [drafts.get(seq_id, NO_DRAFT) for seq_id in asked.seq_ids]
        told = self._acceptance.told(came)
        survivals = self._acceptance.survival_of(asked.seq_ids, told, hope=HOPE)
        values = survivals * asked.weights[:, None]
        if self.price_floor:
            values[values < self.price_floor] = 0.0
        costs = self._cost.rising(shape, values.size)
        counts = admitted(values, costs, goodput=asked.goodput)
        whole = self._whole(asked, values, counts, told.lengths, costs)
        if len(whole):
            counts[whole] = told.lengths[whole]
        asked.survivals = survivals
        admitted_counts = counts.tolist()
        self._metrics.admitted(num_offered=len(told.margins), num_admitted=sum(admitted_counts))
        explored = tuple(asked.seq_ids[at] for at in whole.tolist())
        self._decided("drafting", asked, survivals, counts, explored)
        return dict(zip(asked.seq_ids, admitted_counts, strict=True))

    def _whole(
        self,
        asked: _Asked,
        values: FloatArray,
        counts: IntArray,
        lengths: IntArray,
        costs: FloatArray,
    ) -> IntArray:
        """Whose drafts to verify to their end, to learn from them: places among those asked."""
        turn = self._prospects.num_asked(asked.rows) < NUM_WHOLE
        if self._step % WHOLE_EVERY == 0:
            turn[self._step // WHOLE_EVERY % len(turn)] = True
        elif not turn.any() and not asked.probed.any():
            return NOBODY
        longer = counts < lengths
        whole = asked.probed & longer
        turn &= longer & ~whole
        if turn.any():
            goodput = asked.goodput
            whole |= self._explorer.whole(turn, values, counts, lengths, costs, goodput=goodput)
        return np.flatnonzero(whole)

    def observe(self, record: StepRecord) -> None:
        """Note what became of the step."""
        self.learn()
        self._noted, self._asked = (record, self._asked), None

    def learn(self) -> None:
        """Learn what the step that was noted cost, what its drafts cost, and which were kept."""
        if self._noted is None:
            return
        (record, asked), self._noted = self._noted, None
        num_drafts = sum(len(outcome.draft.token_ids) for outcome in record.outcomes)
        self._cost.observe(record.shape, num_drafts, record.target_seconds)
        self._long_run.observe(record, self._cost)
        if asked is not None and not asked.late:
            self._learn_drafts(asked, record)
        self._acceptance.learn(record.outcomes)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Sequences ended."""
        self.learn()
        self._prospects.forget(seq_ids)
        self._acceptance.forget(seq_ids)

    def _try_others(
        self,
        outlook: Outlook,
        rows: IntArray,
        num_tokens: IntArray,
        asked: BoolArray,
        counts: IntArray,
    ) -> BoolArray:
        """Add to `counts` what to ask of those who do not pay, and say whose is verified anyway."""
        prospects = self._prospects
        due = ~asked & prospects.due(rows, num_tokens, soon=self._explorer.is_rich)
        worth = ~asked & prospects.worth_a_look(rows, num_tokens) | due
        if not worth.any():
            return worth
        looks = self._explorer.looks(outlook, self._draft_cost, asked, worth)
        wait = self._draft_cost.seconds(1, int(outlook.caps.max())) / outlook.step_seconds
        prospects.looked(rows[looks], num_tokens[looks], wait=int(wait / LOOK_SHARE))
        due &= looks
        probed, depth = self._explorer.probes(outlook, due)
        prospects.tried(rows[due], num_tokens[due])
        if looks.any():
            counts[looks] = np.minimum(outlook.depth_that_teaches(looks), outlook.caps[looks])
        counts[probed] = np.minimum(depth, outlook.caps[probed])
        return probed

    def _learn_drafts(self, asked: _Asked, record: StepRecord) -> None:
        """What asking for drafts took, and what it brought."""
        num_asked = int(asked.counts.sum())
        self._draft_cost.observe(len(asked.seq_ids), num_asked, record.draft_seconds)
        survivals = asked.survivals
        if survivals is None:  # whatever came was verified
            verified = {outcome.seq_id: outcome.draft for outcome in record.outcomes}
            came = [verified.get(seq_id, NO_DRAFT) for seq_id in asked.seq_ids]
            survivals = self._acceptance.survival_table(asked.seq_ids, came, hope=HOPE)
        self._prospects.record(asked.rows, survivals, asked.counts)
        if asked.probed.any():
            kept = {outcome.seq_id for outcome in record.outcomes if outcome.num_accepted}
            hopeful = asked.probed & [seq_id in kept for seq_id in asked.seq_ids]
            self._explorer.learn(kept=bool(hopeful.any()))
            self._prospects.encouraged(asked.rows[hopeful])

    def _settle_regime(self, outlook: Outlook) -> None:
        """Begin or end drafting as a whole, and say why."""
        changed = self._regime.changes(outlook.gain, now=self._clock())
        drafting = self._regime.drafting
        if not drafting:
            self._blocked = outlook.blocked_by()
        if changed:
            self._metrics.changed(drafting=drafting, reason=self._blocked)
            logger.info("drafting %s (%s)", "begins" if drafting else "ends", self._blocked)
        self._metrics.regime("drafting" if drafting else self._blocked)

    def _ask(
        self,
        outlook: Outlook,
        seq_ids: list[int],
        rows: IntArray,
        counts: IntArray,
        probed: BoolArray,
    ) -> Mapping[int, int]:
        """Note what is asked, and ask it."""
        weights, worth = outlook.weights, outlook.worth
        if not counts.all():
            where = counts.nonzero()[0]
            seq_ids = [seq_ids[at] for at in where.tolist()]
            rows, counts, probed = rows[where], counts[where], probed[where]
            weights, worth = weights[where], worth[where]
        numbers = counts.tolist()
        num_asked = sum(numbers)
        usual = self._draft_cost.seconds(len(seq_ids), num_asked)
        self._goodput = outlook.goodput
        self._metrics.chosen(num_asked=num_asked, num_probes=int(np.count_nonzero(probed)))
        asked = _Asked(
            seq_ids=seq_ids,
            rows=rows,
            weights=weights,
            counts=counts,
            probed=probed,
            goodput=outlook.goodput,
            draft_seconds=usual,
            asked_at=self._clock(),
        )
        if not seq_ids:
            nothing = np.zeros((0, 0))
            self._decided(self._blocked, asked, nothing, np.zeros(0, dtype=np.int64), ())
            return {}
        expected = float(worth.sum()) / outlook.goodput
        self._patience = max(expected, USUAL_WAITS * usual + LEAST_PATIENCE_SECONDS)
        self._asked = asked
        return dict(zip(seq_ids, numbers, strict=True))

    def _nothing_came(self, asked: _Asked) -> None:
        """No drafts at all: if it took long, nobody is asked again before a probe says so."""
        waited = self._clock() - asked.asked_at
        asked.late = waited >= 0.9 * self._patience
        if asked.late:
            self._prospects.give_up(asked.rows)
            self._lookout.forget()
            self._explorer.spend(waited)
        counts = np.zeros(len(asked.rows), dtype=np.int64)
        reason = "late" if asked.late else "no drafts"
        self._decided(reason, asked, np.zeros((len(asked.rows), 0)), counts, ())

    def _decided(
        self,
        reason: str,
        asked: _Asked,
        survivals: FloatArray,
        counts: IntArray,
        explored: tuple[int, ...],
    ) -> None:
        """Keep the decision, so that it can be explained."""
        decision = Decision(
            step=self._step,
            drafting=self._regime.drafting,
            reason=reason,
            price=self._price,
            goodput=asked.goodput,
            draft_seconds=asked.draft_seconds,
            seq_ids=tuple(asked.seq_ids),
            survivals=survivals,
            admitted=counts,
            explored=explored,
        )
        self._log.keep(decision)
