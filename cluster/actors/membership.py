"""Who is there: what the router remembers, and what everyone else keeps of it.

Soft state. Members say that they are there every REGISTER_SECONDS and are forgotten after
EXPIRY_SECONDS of silence; a router that starts again knows nobody and says so, and its first
snapshots may add members but remove none.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ray.actor import ActorHandle

from cluster.control.assignment import Assignment, Hints, SlowLoop
from cluster.messages import DraftLoad, DraftWeights, EngineLoad

REGISTER_SECONDS = 1.0
EXPIRY_SECONDS = 5.0
SETTLING_SECONDS = 15.0  # in which members find a new router: on a busy machine it takes them some
ROUND_SECONDS = 1.0


class MemberKind(StrEnum):
    """What a member does."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One actor of the data path. `member_id` is new for every start of a process.

    `pool` names the draft pool a draft worker belongs to. `load` is what it said of itself when it
    last registered.
    """

    kind: MemberKind
    member_id: str
    handle: ActorHandle = field(compare=False)
    pool: str = ""
    load: EngineLoad | DraftLoad | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everyone a router knew at one moment.

    `version` grows with every change one router sees. `complete` is False while the router is
    younger than SETTLING_SECONDS: members may exist that have not found it yet. `leases` says which
    draft workers an engine is to use, by engine id; an engine that is not there may use all.
    `weights` are what each draft pool is to draft with; a pool that is not there stays as it is.
    `floors` are the engines' price floors, 0 where there is none.
    """

    version: int = 0
    members: tuple[Member, ...] = ()
    complete: bool = False
    leases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weights: Mapping[str, DraftWeights] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)

    def of_kind(self, kind: MemberKind) -> dict[str, ActorHandle]:
        """The handles of all members of a kind, by member id."""
        return {member.member_id: member.handle for member in self.members if member.kind is kind}

    def drafts_of(self, engine_id: str) -> dict[str, Member]:
        """The draft workers that serve an engine, by worker id."""
        leased = self.leases.get(engine_id)
        return {
            member.member_id: member
            for member in self.members
            if member.kind is MemberKind.DRAFT and (leased is None or member.member_id in leased)
        }

    def after(self, previous: "Snapshot") -> "Snapshot":
        """What to believe now: an incomplete snapshot only adds to the previous one."""
        if self.complete:
            return self
        known = {member.member_id: member for member in (*previous.members, *self.members)}
        return replace(
            self, members=tuple(known.values()), leases=previous.leases, floors=previous.floors
        )

    def seen_by(self, member: Member | None) -> "Snapshot":
        """What of this is a member's business; with thousands of them the whole is too much.

        An engine sees its draft workers, a draft worker nobody, who only listens (None) everybody
        without their loads, which engines tell gateways themselves.
        """
        if member is None:
            return replace(self, members=tuple(replace(other, load=None) for other in self.members))
        name = member.member_id
        if member.kind is MemberKind.DRAFT:
            return replace(self, members=(), leases={}, floors={})
        return replace(
            self,
            members=tuple(self.drafts_of(name).values()),
            leases={name: self.leases[name]} if name in self.leases else {},
            floors={name: self.floors[name]} if name in self.floors else {},
        )


class Roster:
    """The router's memory. `clock` gives seconds that never go back.

    No version is one of another roster: they begin with the time.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born = clock()
        self._version = time.time_ns()
        self._complete = False
        self._loop = SlowLoop()
        self._assigned = Assignment()
        self._assigned_at = float("-inf")
        self._members: dict[str, Member] = {}
        self._heard: dict[str, float] = {}

    def register(self, member: Member) -> None:
        """Take a member in, or hear that it is still there."""
        self._heard[member.member_id] = self._clock()
        if member.member_id not in self._members:
            self._version += 1
        self._members[member.member_id] = member

    def remove(self, member_id: str) -> None:
        """Forget a member that said goodbye; unknown ones are forgotten already."""
        self._heard.pop(member_id, None)
        if self._members.pop(member_id, None) is not None:
            self._version += 1

    @property
    def round_is_due(self) -> bool:
        """Whether it is time to decide again; never while members may be unknown."""
        now = self._clock()
        old = now - self._born >= SETTLING_SECONDS
        return old and now - self._assigned_at >= ROUND_SECONDS

    def round(self) -> Assignment:
        """Decide anew who drafts for whom, and how dear drafts are."""
        self._assigned_at = self._clock()
        engines: dict[str, EngineLoad | None] = {}
        workers: dict[str, dict[str, DraftLoad | None]] = {}
        for name, member in self._members.items():
            load = member.load
            if member.kind is MemberKind.TARGET:
                engines[name] = load if isinstance(load, EngineLoad) else None
            else:
                own = load if isinstance(load, DraftLoad) else None
                workers.setdefault(member.pool, {})[name] = own
        before, self._assigned = self._assigned, self._loop.round(engines, workers)
        if (before.leases, before.floors) != (self._assigned.leases, self._assigned.floors):
            self._version += 1
        return self._assigned

    def snapshot(self) -> Snapshot:
        """Everyone heard of in the last EXPIRY_SECONDS, and what was decided last."""
        now = self._clock()
        for member_id, heard in list(self._heard.items()):
            if now - heard > EXPIRY_SECONDS:
                self.remove(member_id)
        if not self._complete and now - self._born >= SETTLING_SECONDS:
            self._complete = True
            self._version += 1
        return Snapshot(
            version=self._version,
            members=tuple(self._members.values()),
            complete=self._complete,
            leases=self._assigned.leases,
            floors=self._assigned.floors,
            hints=self._assigned.hints,
        )
