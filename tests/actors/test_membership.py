"""Who is there."""

from cluster.actors.membership import EXPIRY_SECONDS, Member, MemberKind, Roster, Snapshot


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
    clock.now += EXPIRY_SECONDS
    grown = roster.snapshot()
    assert names(grown.after(young.after(before))) == {"c"}


def test_kinds_are_told_apart() -> None:
    """Each reader gets the handles it can use, by member id."""
    snapshot = Snapshot(members=(member("a"), member("d", MemberKind.DRAFT)))
    assert snapshot.of_kind(MemberKind.TARGET) == {"a": "handle of a"}
    assert snapshot.of_kind(MemberKind.DRAFT) == {"d": "handle of d"}
