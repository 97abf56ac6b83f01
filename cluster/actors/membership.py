"""Who is there: what the router remembers, and what everyone else keeps of it.

Soft state. Members say that they are there every REGISTER_SECONDS and are forgotten after
EXPIRY_SECONDS of silence; a router that starts again knows nobody and says so, and its first
snapshots may add members but remove none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ray.actor import ActorHandle

REGISTER_SECONDS = 1.0
EXPIRY_SECONDS = 5.0


class MemberKind(StrEnum):
    """What a member does."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One actor of the data path. `member_id` is new for every start of a process."""

    kind: MemberKind
    member_id: str
    handle: ActorHandle = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everyone a router knew at one moment.

    `version` grows with every change one router sees. `complete` is False while the router is
    younger than EXPIRY_SECONDS: members may exist that have not found it yet.
    """

    version: int = 0
    members: tuple[Member, ...] = ()
    complete: bool = False

    def of_kind(self, kind: MemberKind) -> dict[str, ActorHandle]:
        """The handles of all members of a kind, by member id."""
        return {member.member_id: member.handle for member in self.members if member.kind is kind}

    def after(self, previous: "Snapshot") -> "Snapshot":
        """What to believe now: an incomplete snapshot only adds to the previous one."""
        if self.complete:
            return self
        known = {member.member_id: member for member in (*previous.members, *self.members)}
        return replace(self, members=tuple(known.values()))


class Roster:
    """The router's memory. `clock` gives seconds that never go back."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born = clock()
        self._version = 0
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

    def snapshot(self) -> Snapshot:
        """Everyone heard of in the last EXPIRY_SECONDS."""
        now = self._clock()
        for member_id, heard in list(self._heard.items()):
            if now - heard > EXPIRY_SECONDS:
                self.remove(member_id)
        return Snapshot(
            version=self._version,
            members=tuple(self._members.values()),
            complete=now - self._born >= EXPIRY_SECONDS,
        )
