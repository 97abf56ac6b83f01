"""Who is there."""

from dataclasses import replace

from cluster.actors.membership import (
    EXPIRY_SECONDS,
    ROUND_SECONDS,
    SETTLING_SECONDS,
    Member,
    MemberKind,
    Roster,
    Snapshot,
)
from cluster.messages import DraftLoad, EngineLoad


def member(name: str, kind: MemberKind = MemberKind.TARGET) -> Member:
    return Member(kind=kind, member_id=name, handle=f"handle of {name}")


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time it is."""
        return self.now


def names(snapshot: Snapshot) -> set[str]:
    return {member.member_id for member in snapshot.members}


def test_who_falls_silent_is_forgotten_and_the_others_stay() -> None:
    """Membership is soft: it lasts as long as it is renewed."""
    clock = Clock()
    roster = Roster(clock=clock)
    roster.register(member("a"))
    roster.register(member("b"))
    clock.now += EXPIRY_SECONDS
    roster.register(member("b"))
    clock.now += 0.001
    assert names(roster.snapshot()) == {"b"}


def test_the_version_tells_every_change_and_nothing_else() -> None:
    """Renewals leave the version alone; joining, leaving and expiring do not."""
    clock = Clock()
    roster = Roster(clock=clock)
    versions = [roster.snapshot().version]
    for change in (
        lambda: roster.register(member("a")),
        lambda: roster.register(member("b")),
        lambda: roster.remove("a"),
        lambda: setattr(clock, "now", clock.now + 2 * EXPIRY_SECONDS),
    ):
        change()
        versions.append(roster.snapshot().version)
        roster.remove("stranger")
        assert roster.snapshot().version == versions[-1]
    assert len(set(versions)) == len(versions)
    roster.register(member("c"))
    version = roster.snapshot().version
    roster.register(member("c"))
    assert roster.snapshot().version == version


def test_a_young_router_takes_nobody_away() -> None:
    """After a router's restart members are added at once, and missed only when all had time."""
    clock = Clock()
    before = Snapshot(members=(member("a"), member("b")), complete=True)
    roster = Roster(clock=clock)
    roster.register(member("c"))
    young = roster.snapshot()
    assert names(young.after(before)) == {"a", "b", "c"}
    clock.now += SETTLING_SECONDS
    roster.register(member("c"))
    grown = roster.snapshot()
    assert names(grown.after(young.after(before))) == {"c"}


def test_kinds_are_told_apart() -> None:
    """Each reader gets the handles it can use, by member id."""
    snapshot = Snapshot(members=(member("a"), member("d", MemberKind.DRAFT)))
    assert snapshot.of_kind(MemberKind.TARGET) == {"a": "handle of a"}
    assert snapshot.of_kind(MemberKind.DRAFT) == {"d": "handle of d"}


def load(running: int) -> EngineLoad:
    return EngineLoad(
        running=running,
        waiting=0,
        free_blocks=1,
        step_id=1,
        max_num_seqs=8,
        tokens_per_second=10.0,
        accepted_per_second=5.0,
    )


def grown(*members: Member) -> tuple[Roster, Clock]:
    """A roster that is old enough to decide, and knows these."""
    clock = Clock()
    roster = Roster(clock=clock)
    clock.now += SETTLING_SECONDS
    for each in members:
        roster.register(each)
    return roster, clock


PARTY = (
    replace(member("a"), load=load(4)),
    replace(member("b"), load=load(4)),
    replace(member("d", MemberKind.DRAFT), pool="p", load=DraftLoad()),
    replace(member("e", MemberKind.DRAFT), pool="p", load=DraftLoad()),
)


def test_rounds_begin_when_all_had_time_and_come_about_once_a_second() -> None:
    """A young router knows too few to give them to anyone; until then the old leases stand."""
    clock = Clock()
    roster = Roster(clock=clock)
    for each in PARTY:
        roster.register(each)
    assert not roster.round_is_due
    before = Snapshot(leases={"a": ("x",)}, floors={"a": 0.1}, complete=True)
    believed = roster.snapshot().after(before)
    assert (believed.leases, believed.floors) == (before.leases, before.floors)
    clock.now += SETTLING_SECONDS
    assert roster.round_is_due
    roster.round()
    assert not roster.round_is_due
    clock.now += ROUND_SECONDS
    assert roster.round_is_due


def test_leases_are_told_as_a_new_version_and_name_those_who_are_there() -> None:
    """Each busy engine has a worker of its own; a round that changes nothing is no news."""
    roster, clock = grown(*PARTY)
    before = roster.snapshot().version
    roster.round()
    snapshot = roster.snapshot()
    assert snapshot.version > before
    drafts = [set(snapshot.drafts_of(name)) for name in "ab"]
    assert {"d"} in drafts
    assert {"e"} in drafts
    clock.now += ROUND_SECONDS
    roster.round()
    assert roster.snapshot().version == snapshot.version
    roster.remove("d")
    assert set.union(*(set(roster.snapshot().drafts_of(name)) for name in "ab")) == {"e"}


def test_everyone_sees_what_is_their_business() -> None:
    """Gateways everybody, engines their draft workers with their loads, draft workers nobody."""
    roster, _ = grown(*PARTY)
    roster.round()
    snapshot = roster.snapshot()
    assert names(snapshot.seen_by(None)) == {"a", "b", "d", "e"}
    assert all(each.load is None for each in snapshot.seen_by(None).members)
    own = snapshot.seen_by(PARTY[0])
    assert own.drafts_of("a") == snapshot.drafts_of("a")
    assert [type(each.load) for each in own.members] == [DraftLoad]
    assert own.leases.keys() == {"a"}
    assert names(snapshot.seen_by(PARTY[2])) == set()


def test_no_two_routers_have_a_version_in_common() -> None:
    """Whoever has seen a version of one router is told of another's members."""
    assert Roster().snapshot().version != Roster().snapshot().version != Snapshot().version
