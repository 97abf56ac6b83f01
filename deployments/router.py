"""The router: soft state about who is there. Nothing on the token path touches it."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.actors.membership import Member, MemberKind, Roster, Snapshot
from cluster.metrics import Family, collect
from deployments.supervision import yield_to_compute


class Router:
    """One replica, no memory beyond its life: members register again every second."""

    def __init__(self) -> None:
        yield_to_compute()
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

    async def register(self, member: Member | None) -> Snapshot:
        """Hear of a member (None: someone who only listens), and tell who else is there."""
        if member is not None:
            self._roster.register(member)
            self._registrations.inc()
        return self._roster.snapshot()

    async def remove(self, member_id: str) -> None:
        """A member takes no new work from now on."""
        self._roster.remove(member_id)

    async def metrics(self) -> tuple[Family, ...]:
        """Everything this process has counted."""
        snapshot = self._roster.snapshot()
        for kind, gauge in self._members.items():
            gauge.set(len(snapshot.of_kind(kind)))
        return collect(self._registry)
