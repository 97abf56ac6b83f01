"""Which weights each draft pool drafts with: swaps, trials, and the return from what is worse.

    settled ──swap──> on trial ──no worse, SETTLED positions──> settled
                         └──────surely worse──> the trusted weights again

Soft state: what is known here is what the workers say. They say what they were last told to draft
with, so one that begins anew takes up the latest decision, and the trial with it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.control.rollback import Acceptance, Verdict, judge, total
from cluster.messages import DraftLoad, DraftWeights, VersionGrade

MOST_WORKERS = 4096  # whose grades are kept, those that ended among them


@dataclass(frozen=True, slots=True)
class Decision:
    """A trial is over: `weights` are those from now on."""

    pool: str
    verdict: Verdict
    weights: DraftWeights
    old: Acceptance
    new: Acceptance


@dataclass(slots=True)
class _Pool:
    weights: DraftWeights = field(default_factory=DraftWeights)
    highest: int = 0  # version there ever was
    grades: OrderedDict[str, tuple[VersionGrade, ...]] = field(default_factory=OrderedDict)

    def acceptance(self, version: int) -> Acceptance:
        """Of a version, at all workers."""
        return total(
            Acceptance(grade.num_verified, grade.num_accepted)
            for grades in self.grades.values()
            for grade in grades
            if grade.version == version
        )


class DraftPools:
    """Every pool that a worker has been heard of."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    @property
    def weights(self) -> Mapping[str, DraftWeights]:
        """What each pool is to draft with."""
        return {name: pool.weights for name, pool in self._pools.items()}

    def hear(self, pool: str, worker_id: str, load: DraftLoad) -> None:
        """A worker said how it is."""
        known = self._pools.setdefault(pool, _Pool())
        known.grades[worker_id] = load.grades
        known.grades.move_to_end(worker_id)
        if len(known.grades) > MOST_WORKERS:
            known.grades.popitem(last=False)
        known.highest = max(known.highest, load.version, load.weights.version)
        if load.weights.turn > known.weights.turn:
            known.weights = load.weights

    def swap(self, pool: str, folder: str, node_id: str) -> DraftWeights:
        """Try a folder's weights from now on; what is not known to be good is not returned to.

        Raises KeyError for a pool that nobody was heard of.
        """
        known = self._pools[pool]
        known.highest += 1
        now = known.weights
        known.weights = DraftWeights(
            version=known.highest,
            turn=now.turn + 1,
            folder=folder,
            node_id=node_id,
            previous=now.previous or now,
        )
        return known.weights

    def judge(self) -> list[Decision]:
        """End the trials whose outcome is clear."""
        decisions = []
        for name, pool in self._pools.items():
            trusted = pool.weights.previous
            if trusted is None:
                continue
            old = pool.acceptance(trusted.version)
            new = pool.acceptance(pool.weights.version)
            verdict = judge(old, new)
            if verdict is Verdict.WAIT:
                continue
            stays = pool.weights if verdict is Verdict.KEEP else trusted
            pool.weights = replace(stays, turn=pool.weights.turn + 1, previous=None)
            decisions.append(Decision(name, verdict, pool.weights, old, new))
        return decisions
