"""The slow loop: who drafts for whom, how dear a draft is, and what more of something would bring.

    round   loads of all engines and draft workers  ──>  leases, price floors, hints

A worker goes where it brings the most tokens: each further one brings an engine less than the one
before. It changes engines only when it is worth clearly more elsewhere, since it takes along
nothing of what it knows, and a round moves few. Engines at rest are leased a few workers that
others use: whoever begins has some to begin with.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from cluster.control.leases import Claim, lease
from cluster.control.routing import Need, Standing, estimate
from cluster.messages import DraftLoad, EngineLoad

SMOOTHING = 0.3  # of a round, in what is believed of an engine
LEAST_DEMAND = 0.25  # sequences, below which an engine is at rest
USUAL_SEQUENCES = 16.0  # of a draft worker, while it is unknown how many it can serve
MOST_SEQUENCES = 256.0
BUSY_ENOUGH = 0.1  # of a worker's time, to tell from
NUM_SPARE = 4  # workers an engine at rest may ask
LEAST_WORTH = 0.05  # of what is usual: where drafting does not pay it may yet come to
FLOOR_STEP = 0.05  # of survival, a round
MOST_FLOOR = 0.5
NOBODY = Claim(demand=0.0, worth=0.0, sequences=USUAL_SEQUENCES)
LONG_WAIT_SECONDS = 1.0  # above it drafts become dearer, and cheaper below half of it


@dataclass(frozen=True, slots=True)
class PoolHint:
    """What a draft pool brings, and what it would with another worker.

    `gain` is the part of the engines' tokens that were drafts, `marginal` in tokens a second, and
    `late_ratio` the part of their steps that asked for drafts and had none in time. `claim` is
    that of all of them together, who give `tokens_per_second`.
    """

    num_engines: int = 0  # that have work
    num_workers: int = 0
    gain: float = 0.0
    marginal: float = 0.0
    late_ratio: float = 0.0
    claim: Claim = NOBODY
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Hints:
    """For whoever scales: `wait_seconds` is the engines' mean until it is a request's turn.

    `least_floor` is the lowest price floor: at MOST_FLOOR guessing less helps nobody any more.
    """

    wait_seconds: float = 0.0
    least_floor: float = 0.0
    pools: Mapping[str, PoolHint] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one round decided. `num_moved` workers went from one engine to another.

    An engine that is not in `leases` may use all workers; one that is not in `floors` has none.
    """

    leases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    hints: Hints = Hints()
    num_moved: int = 0


@dataclass(slots=True)
class _Believed:
    """What of an engine is believed, from its loads so far; `worth` of a drafted sequence."""

    demand: float = 0.0
    worth: float | None = None
    floor: float = 0.0

    def observe(self, load: EngineLoad) -> None:
        """Another load."""
        demand = min(load.running + load.waiting, load.max_num_seqs)
        self.demand += SMOOTHING * (demand - self.demand)
        if load.running and load.tokens_per_second > 0:
            worth = load.accepted_per_second / load.running
            before = worth if self.worth is None else self.worth
            self.worth = before + SMOOTHING * (worth - before)


class SlowLoop:
    """Remembers from round to round what it decided, and what it saw of each engine."""

    def __init__(self) -> None:
        self._engines: dict[str, _Believed] = {}
        self._leases: dict[str, dict[str, tuple[str, ...]]] = {}  # by pool, by engine

    def round(
        self,
        engines: Mapping[str, EngineLoad | None],
        workers: Mapping[str, Mapping[str, DraftLoad | None]],
    ) -> Assignment:
        """Decide for the engines there are, and the workers by pool. None: it has not told yet."""
        known = {name: load for name, load in engines.items() if load is not None}
        self._engines = {name: self._engines.get(name, _Believed()) for name in known}
        waits = {}
        for name, load in known.items():
            self._engines[name].observe(load)
            waits[name] = _wait_seconds(name, load)
            self._engines[name].floor = _floor(self._engines[name].floor, waits[name])
        num_moved = 0
        pools = {}
        held: dict[str, tuple[str, ...]] = dict.fromkeys(known, ())
        before, self._leases = self._leases, {}
        for pool, loads in workers.items():
            sequences = _sequences_each(loads)
            claims = self._claims(sequences)
            leases, moved = lease(claims, sorted(loads), before.get(pool, {}))
            num_moved += moved
            self._leases[pool] = leases
            spare = _spare(known.keys() - leases.keys(), sorted(loads))
            for name, names in (leases | spare).items():
                held[name] += names
            pools[pool] = _hint(claims, known, num_workers=len(loads), sequences=sequences)
        floors = {name: each.floor for name, each in self._engines.items()}
        return Assignment(
            leases=held,
            floors={name: floor for name, floor in floors.items() if floor > 0},
            hints=Hints(
                wait_seconds=sum(waits.values()) / len(waits) if waits else 0.0,
                least_floor=min(floors.values(), default=0.0),
                pools=pools,
            ),
            num_moved=num_moved,
        )

    def _claims(self, sequences: float) -> dict[str, Claim]:
        """What each engine that has work would make of workers."""
        told = [each.worth for each in self._engines.values() if each.worth]
        usual = sum(told) / len(told) if told else 1.0
        return {
            name: Claim(
                demand=each.demand,
                worth=usual if each.worth is None else max(each.worth, LEAST_WORTH * usual),
                sequences=sequences,
            )
            for name, each in self._engines.items()
            if each.demand >= LEAST_DEMAND
        }


def _wait_seconds(name: str, load: EngineLoad) -> float:
    return estimate(Standing(engine_id=name, load=load), Need(num_tokens=1)).turn_seconds


def _floor(before: float, wait_seconds: float) -> float:
    """A step up while requests wait long, a step down when they do not, and none between."""
    if wait_seconds > LONG_WAIT_SECONDS:
        return min(before + FLOOR_STEP, MOST_FLOOR)
    if wait_seconds < LONG_WAIT_SECONDS / 2:
        return max(before - FLOOR_STEP, 0.0)
    return before


def _sequences_each(loads: Mapping[str, DraftLoad | None]) -> float:
    """How many sequences a worker of a pool serves at most, as far as they tell."""
    told = [
        load.num_sequences / load.busy_ratio
        for load in loads.values()
        if load is not None and load.busy_ratio > BUSY_ENOUGH and load.num_sequences
    ]
    return min(max(sum(told) / len(told), 1.0), MOST_SEQUENCES) if told else USUAL_SEQUENCES


def _spare(engines: Iterable[str], workers: list[str]) -> dict[str, tuple[str, ...]]:
    """A few workers for each engine at rest, always the same ones, others for each engine."""
    count = min(NUM_SPARE, len(workers))
    spare = {}
    for name in engines:
        first = crc32(name.encode()) % max(len(workers), 1)
        spare[name] = tuple((workers * 2)[first : first + count])
    return spare


def _hint(
    claims: Mapping[str, Claim],
    loads: Mapping[str, EngineLoad],
    *,
    num_workers: int,
    sequences: float,
) -> PoolHint:
    """What the pool brings to all engines that have work, taken as one."""
    tokens = sum(loads[name].tokens_per_second for name in claims)
    accepted = sum(loads[name].accepted_per_second for name in claims)
    demand = math.fsum(claim.demand for claim in claims.values())
    worth = math.fsum(claim.demand * claim.worth for claim in claims.values())
    everyone = Claim(demand, worth / demand if demand else 0.0, sequences)
    return PoolHint(
        num_engines=len(claims),
        num_workers=num_workers,
        gain=accepted / tokens if tokens else 0.0,
        marginal=everyone.marginal(num_workers),
        late_ratio=sum(loads[name].late_ratio for name in claims) / max(len(claims), 1),
        claim=everyone,
        tokens_per_second=tokens,
    )
