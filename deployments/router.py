"""The router: soft state about who is there, and the slow loop. No token passes through it."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from ray import ObjectRef

from cluster.actors.membership import Member, MemberKind, Roster, Snapshot
from cluster.config import DrafthouseConfig
from cluster.control.assignment import Assignment
from cluster.garbage import freeze_loaded
from cluster.logs import setup_logging
from cluster.metrics import Family, collect
from deployments.draft_pools import PoolKeeper
from deployments.supervision import yield_to_compute


class Router:
    """One replica, no memory beyond its life: members register again every second."""

    def __init__(self, config: DrafthouseConfig) -> None:
        yield_to_compute()
        setup_logging("router", config.observability)
        self._roster = Roster()
        self._registry = CollectorRegistry()
        self._registrations = Counter(
            "drafthouse_router_registrations",
            "Times a member was heard of.",
            registry=self._registry,
        )
        members = Gauge(
            "drafthouse_members", "Members there are, by kind.", ("kind",), registry=self._registry
        )
        self._members = {kind: members.labels(kind=kind) for kind in MemberKind}
        self._draft_pools = PoolKeeper(self._registry)
        self._rounds = _RoundMetrics(self._registry)
        freeze_loaded()

    async def register(self, member: Member | None, known: int | None = None) -> Snapshot | None:
        """Hear of a member (None: someone who only listens), and tell what it has to know.

        None to whoever only listens and has seen this version: nothing has changed since.
        """
        if member is not None:
            self._roster.register(member)
            self._draft_pools.hear(member)
            self._registrations.inc()
        if self._roster.round_is_due:
            with self._rounds.seconds.time():
                assignment = self._roster.round()
            self._rounds.observe(assignment)
        snapshot = self._roster.snapshot()
        if member is None and snapshot.version == known:
            return None
        return replace(snapshot.seen_by(member), weights=dict(self._draft_pools.weights))

    async def remove(self, member_id: str) -> None:
        """A member takes no new work from now on."""
        self._roster.remove(member_id)

    async def swap_draft(self, pool: str, folder: str, node_id: str) -> int:
        """Have a draft pool try new weights; returns their version. See PoolKeeper.swap."""
        return await self._draft_pools.swap(pool, folder, node_id)

    async def draft_weights(self, pool: str, version: int) -> tuple[ObjectRef, ...]:
        """Where a version's weights are: one ref, or none if they are not the pool's now."""
        return self._draft_pools.stored(pool, version)

    async def metrics(self) -> tuple[Family, ...]:
        """Everything this process has counted."""
        snapshot = self._roster.snapshot()
        for kind, gauge in self._members.items():
            gauge.set(len(snapshot.of_kind(kind)))
        self._draft_pools.publish()
        return collect(self._registry)


class _RoundMetrics:
    """What the slow loop decides, and what it takes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "drafthouse_router_round_seconds", "Seconds of a slow round.", registry=registry
        )
        self._moved = Counter(
            "drafthouse_draft_workers_moved",
            "Times a draft worker was leased to another engine.",
            registry=registry,
        )
        self._floor = Gauge(
            "drafthouse_price_floor_lowest",
            "The lowest price floor of an engine: as a survival.",
            registry=registry,
        )
        self._wait = Gauge(
            "drafthouse_expected_wait_seconds",
            "Until it is a request's turn, as a mean over the engines.",
            registry=registry,
        )

    def observe(self, assignment: Assignment) -> None:
        """Publish a round."""
        self._moved.inc(assignment.num_moved)
        self._floor.set(assignment.hints.least_floor)
        self._wait.set(assignment.hints.wait_seconds)
