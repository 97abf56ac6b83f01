"""A whole cluster in virtual time: the real routing, scaling and arithmetic of guessing.

    arrival ──> routing ──> engine ... next change of its batch ──> engine ... ──> done
    every tick:   how busy the draft workers are; how many replicas there should be
    every round:  the router's slow loop, which says who drafts for whom

Nothing happens between two events: a step is never simulated by itself.
"""

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import perf_counter

from cluster.config import DrafthouseConfig
from cluster.control.assignment import Assignment, PoolHint, SlowLoop
from cluster.control.cost import CostTable
from cluster.control.routing import Need
from cluster.control.scaling import DraftingLoad
from cluster.errors import Overloaded, TargetUnavailable
from cluster.tools.bench.progress import Report, silent
from cluster.tools.simulation.drafting import DraftCosts, SimulatedDrafts
from cluster.tools.simulation.engines import Job, SimulatedEngine
from cluster.tools.simulation.fleet import Fleet
from cluster.tools.simulation.guessing import LATE_LEVELS, Guesser, level_of
from cluster.tools.simulation.outcome import Outcome
from cluster.tools.simulation.record import Record
from cluster.tools.simulation.routes import Routes
from cluster.tools.simulation.sizes import Sizes
from cluster.tools.simulation.traffic import Traffic

POOL = "draft"
REPORT_EVERY = 2000  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """A cluster and what its parts cost. Seconds are of virtual time."""

    config: DrafthouseConfig
    cost: CostTable
    draft_costs: DraftCosts = field(default_factory=DraftCosts)
    start_seconds: float = 30.0  # of a target; of a draft worker a third
    tick_seconds: float = 1.0
    round_seconds: float = 10.0
    deadline_seconds: float | None = None  # to the first token, of every request


class SimulatedCluster:
    """Plays a trace, once."""

    def __init__(self, plan: SimulationPlan, traffic: Traffic) -> None:
        config = plan.config
        self._plan = plan
        self._traffic = traffic
        self._record = Record(traffic)
        self._guesser = Guesser(
            plan.cost,
            cap=_cap(config),
            mean_context=int(traffic.prompts.mean() + traffic.outputs.mean() / 2),
            fixed=config.speculation.policy == "fixed",
        )
        self._targets = Fleet(self._make_engine, name="target", start_seconds=plan.start_seconds)
        self._workers = Fleet(_id_of, name="draft", start_seconds=plan.start_seconds / 3)
        self._drafts = SimulatedDrafts(plan.draft_costs)
        self._sizes = Sizes(config)
        self._routes = Routes()
        self._slow_loop = SlowLoop()
        self._leases = Assignment().leases
        self._hint = PoolHint()
        self._leaving: list[tuple[float, SimulatedEngine]] = []  # until when, and who
        self._events: list[tuple[float, int, SimulatedEngine]] = []
        self._num_events = 0
        self._has_workers = self._sizes.num_drafts > 0

    def run(self, *, report: Report = silent) -> Outcome:
        """Until the last request has ended."""
        plan, arrivals = self._plan, self._traffic.arrivals.tolist()
        self._targets.begin(self._sizes.num_targets, now=0.0)
        self._workers.begin(self._sizes.num_drafts, now=0.0)
        arrived, now = 0, 0.0
        next_tick = next_round = 0.0
        while arrived < len(arrivals) or self._record.num_open:
            event_at = self._events[0][0] if self._events else math.inf
            arrival_at = arrivals[arrived] if arrived < len(arrivals) else math.inf
            now = min(event_at, arrival_at, next_tick)
            if now == next_tick:
                if now >= next_round:
                    self._round()
                    next_round += plan.round_seconds
                self._tick(now)
                next_tick += plan.tick_seconds
            elif now == event_at:
                self._settle(now)
            else:
                if arrived % REPORT_EVERY == 0:
                    report("requests", arrived, len(arrivals))
                self._arrive(arrived, now)
                arrived += 1
        report("requests", arrived, len(arrivals))
        return self._record.outcome(now, self._everyone())

    def _make_engine(self, engine_id: str, now: float) -> SimulatedEngine:
        engine = SimulatedEngine(engine_id, self._guesser, self._plan.config.target, now=now)
        if self._has_workers:
            engine.late = LATE_LEVELS
        self._routes.add(engine)
        return engine

    def _arrive(self, index: int, now: float) -> None:
        traffic = self._traffic
        job = Job(
            index=index,
            arrived_at=now,
            prompt=int(traffic.prompts[index]),
            output=int(traffic.outputs[index]),
            level=level_of(float(traffic.acceptances[index])),
        )
        try:
            self._send(job, now, deadline_seconds=self._plan.deadline_seconds)
        except (Overloaded, TargetUnavailable):
            self._record.refused()
        else:
            self._record.opened()

    def _send(self, job: Job, now: float, *, deadline_seconds: float | None = None) -> None:
        need = Need(num_tokens=job.prompt, max_tokens=job.output, deadline_seconds=deadline_seconds)
        engine = self._routes.choose(need)
        engine.submit(job, now=now)
        self._routes.moved(engine)
        self._await(engine)

    def _await(self, engine: SimulatedEngine) -> None:
        """Come back to an engine when its batch changes next."""
        if math.isfinite(engine.next_at):
            self._num_events += 1
            heappush(self._events, (engine.next_at, self._num_events, engine))

    def _settle(self, now: float) -> None:
        at, _, engine = heappop(self._events)
        if at != engine.next_at:
            return  # it changed before, and said when next
        for job in engine.settle(now=now):
            self._record.ended(job)
        self._routes.moved(engine)
        self._await(engine)

    def _round(self) -> None:
        """The router's: who drafts for whom, and how dear a draft is."""
        engines = self._targets.there
        loads = {each: engine.load() for each, engine in engines.items()}
        workers = self._drafts.worker_loads(tuple(self._workers.there), engines, self._leases)
        pools = {POOL: workers} if self._has_workers else {}
        begin = perf_counter()
        decided = self._slow_loop.round(loads, pools)
        self._record.round(perf_counter() - begin)
        self._leases = decided.leases
        self._hint = decided.hints.pools.get(POOL, PoolHint())
        for engine_id, engine in engines.items():
            engine.floor = decided.floors.get(engine_id, 0.0)

    def _tick(self, now: float) -> None:
        targets, workers = self._targets, self._workers
        targets.arrive(now=now)
        workers.arrive(now=now)
        for engine in targets.there.values():
            engine.measure(now)
        if self._has_workers:
            self._drafts.settle(targets.there, self._leases, tuple(workers.there))
        self._record.tick(
            now,
            targets.there,
            num_targets=targets.wanted + len(self._leaving),
            num_drafts=workers.wanted,
        )
        self._scale_targets(now)
        self._scale_drafts(now)
        self._end_leaving(now)

    def _scale_targets(self, now: float) -> None:
        before = self._targets.wanted
        after = self._sizes.targets(self._targets.there, current=before, now=now)
        self._record.changed(now, "targets", before, after)
        if after > before:
            self._targets.grow(after - before, now=now)
        elif after < before:
            grace = now + self._plan.config.gateway.drain_seconds
            for engine in self._targets.shrink(before - after, order=_num_held):
                self._routes.remove(engine)
                self._leaving.append((grace, engine))

    def _scale_drafts(self, now: float) -> None:
        before = self._workers.wanted
        if not self._has_workers:
            return
        loads = [DraftingLoad.of(self._hint)] * len(self._workers.there)
        after = self._sizes.drafts(loads, current=before, now=now)
        self._record.changed(now, "drafts", before, after)
        if after > before:
            self._workers.grow(after - before, now=now)
        elif after < before:
            self._workers.shrink(before - after, order=lambda _: 0.0)
        if after != before:
            self._round()

    def _end_leaving(self, now: float) -> None:
        """Those that are empty end; at the grace's end the others hand over what they hold."""
        staying = []
        for grace, engine in self._leaving:
            if now >= grace:
                for job in engine.hand_over(now=now):
                    self._record.moved()
                    self._send(job, now)
            if engine.num_held:
                staying.append((grace, engine))
            else:
                self._record.left(engine.advance_to(now))
        self._leaving = staying

    def _everyone(self) -> list[SimulatedEngine]:
        return [*self._targets.there.values(), *(engine for _, engine in self._leaving)]


def _cap(config: DrafthouseConfig) -> int:
    """The most drafts of a sequence; none without a drafter."""
    if config.drafter.kind == "off":
        return 0
    return config.speculation.num_speculative_tokens


def _num_held(engine: SimulatedEngine) -> float:
    return engine.num_held


def _id_of(replica_id: str, now: float) -> str:
    del now
    return replica_id
