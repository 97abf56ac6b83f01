"""Several drafters at once: which one serves, what grading learns, and what a bad one can do."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from cluster.drafters import members
from cluster.drafters.choice import ChoiceDrafter
from cluster.drafters.grades import Grades
from cluster.drafters.ngram import NgramDrafter
from cluster.errors import DrafterUnavailable
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft, SamplingSpec
from tests.fakes import FakeModel, SameDrafter, SilentDrafter

GREEDY = SamplingSpec(seed=0, temperature=0.0)
K = 4


class Clock:
    """A clock that only those who take time move."""

    now = 0.0

    def __call__(self) -> float:
        """Now, in seconds."""
        return self.now


@dataclass
class Scripted:
    """Proposes `num_right` right tokens and then wrong ones, of a text that counts upwards.

    It takes `seconds` of the clock; with an `error` it raises that instead.
    """

    name: str
    num_right: int
    seconds: float = 0.0
    clock: Clock = field(default_factory=Clock)
    context_limit: int | None = None
    error: BaseException | None = None
    held: set[int] = field(default_factory=set)
    num_calls: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)  # length, num_wanted

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """The draft of each."""
        self.num_calls += 1
        self.asked += [(len(query.token_ids), query.num_wanted) for query in queries]
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error
        self.held |= {query.seq_id for query in queries}
        return {query.seq_id: self._draft(query) for query in queries}

    def _draft(self, query: DraftQuery) -> Draft:
        start = len(query.token_ids)
        right = range(start, start + self.num_right)
        return Draft((*right, *(10**6,) * query.num_wanted)[: query.num_wanted])

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget them."""
        self.held.difference_update(seq_ids)


class Target:
    """Goes on with a text that counts upwards, a step of `seconds` at a time."""

    def __init__(self, drafter: ChoiceDrafter, clock: Clock, *, seconds: float = 1.0) -> None:
        self._drafter = drafter
        self._clock = clock
        self._seconds = seconds
        self.texts: dict[int, list[int]] = {}

    def begin(self, seq_id: int, num_tokens: int = 1) -> None:
        """A sequence comes."""
        self.texts[seq_id] = list(range(num_tokens))

    async def step(self, num_wanted: int = K) -> dict[int, Draft]:
        """Ask for drafts, verify them, commit; returns the drafts."""
        queries = [
            DraftQuery(seq_id=seq_id, token_ids=text, num_wanted=num_wanted, sampling=GREEDY)
            for seq_id, text in self.texts.items()
        ]
        drafts = dict(await self._drafter.propose(queries))
        self._clock.now += self._seconds
        for seq_id, text in self.texts.items():
            for token_id in drafts.get(seq_id, Draft()).token_ids:
                if token_id != len(text):
                    break
                text.append(token_id)
            text.append(len(text))
        return drafts

    async def run(self, num_steps: int) -> list[str]:
        """Steps; who drafted for the first sequence at each."""
        names = []
        for _ in range(num_steps):
            drafts = await self.step()
            names.append(drafts.get(next(iter(self.texts)), Draft()).drafter)
        return names


def choice_of(
    free: Sequence[Drafter], paid: Sequence[Drafter], clock: Clock | None = None
) -> ChoiceDrafter:
    return ChoiceDrafter(free=free, paid=paid, patience_seconds=0.05, clock=clock or Clock())


async def run(
    free: Sequence[Drafter], paid: Sequence[Drafter], clock: Clock, *, num_steps: int = 100
) -> list[str]:
    """Who served one sequence at each of a number of steps."""
    target = Target(choice_of(free, paid, clock), clock)
    target.begin(1)
    return await target.run(num_steps)


async def test_of_two_free_drafters_the_better_one_serves() -> None:
    """What was not used is graded all the same, so a better second drafter is found out."""
    names = await run([Scripted("poor", 1), Scripted("good", 3)], [], Clock())
    assert names[0] == "poor"
    assert set(names[10:]) == {"good"}


async def test_a_paid_drafter_serves_where_it_pays() -> None:
    """Three tokens more for a tenth of a step's time are worth waiting for."""
    clock = Clock()
    paid = Scripted("model", 4, seconds=0.1, clock=clock)
    names = await run([Scripted("ngram", 0)], [paid], clock)
    assert set(names[20:]) == {"model"}


async def test_a_paid_drafter_that_takes_too_long_is_hardly_asked() -> None:
    """One token more for four steps' time is not; it is tried again ever more seldom."""
    clock = Clock()
    paid = Scripted("model", 2, seconds=4.0, clock=clock)
    names = await run([Scripted("ngram", 1)], [paid], clock, num_steps=500)
    assert set(names[20:]) == {"ngram"}
    assert paid.num_calls < 15


async def test_a_paid_drafter_no_better_than_the_free_one_is_hardly_asked() -> None:
    """However fast it is: what it brings is there already."""
    clock = Clock()
    paid = Scripted("model", 2, seconds=0.01, clock=clock)
    await run([Scripted("ngram", 3)], [paid], clock, num_steps=500)
    assert paid.num_calls < 20


async def test_a_paid_drafter_that_has_become_good_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trials go on for ever, at most MAX_TRIAL_STEPS apart."""
    monkeypatch.setattr(members, "MAX_TRIAL_STEPS", 128)
    clock = Clock()
    paid = Scripted("model", 0, seconds=0.1, clock=clock)
    target = Target(choice_of([Scripted("ngram", 1)], [paid], clock), clock)
    target.begin(1)
    assert set((await target.run(300))[100:]) == {"ngram"}
    paid.num_right = 4
    names = await target.run(12 * members.MAX_TRIAL_STEPS)
    assert set(names[-10:]) == {"model"}


async def test_each_sequence_has_the_drafter_that_is_good_for_it() -> None:
    """Grades are of all sequences and of each."""

    class Selective(Scripted):
        def _draft(self, query: DraftQuery) -> Draft:
            right = super()._draft(query)
            return right if query.seq_id == self.num_right else Draft((10**6,) * query.num_wanted)

    target = Target(choice_of([Selective("one", 1), Selective("two", 2)], []), Clock())
    target.begin(1)
    target.begin(2)
    for _ in range(50):
        drafts = await target.step()
    assert {seq_id: draft.drafter for seq_id, draft in drafts.items()} == {1: "one", 2: "two"}


@pytest.mark.parametrize("error", [DrafterUnavailable("died"), ValueError("a bug")])
@pytest.mark.parametrize("fails", ["free", "paid"])
async def test_a_member_that_fails_takes_nothing_from_the_others(
    error: Exception, fails: str
) -> None:
    """The other's drafts still come, at every step; a failing paid one is left alone mostly."""
    clock = Clock()
    bad = Scripted("bad", 4, clock=clock, error=error)
    good = Scripted("good", 3, clock=clock)
    free, paid = ([bad], [good]) if fails == "free" else ([good], [bad])
    assert set(await run(free, paid, clock)) == {"good"}
    if fails == "paid":
        assert bad.num_calls < 12


async def test_when_all_fail_the_engine_is_told_why() -> None:
    """Its one place that answers for drafters counts the reason."""
    choice = choice_of([Scripted("bad", 4, error=DrafterUnavailable("none"))], [])
    query = DraftQuery(seq_id=1, token_ids=[0], num_wanted=1, sampling=GREEDY)
    with pytest.raises(DrafterUnavailable, match="none"):
        await choice.propose([query])


async def test_a_late_member_does_not_hold_up_the_others() -> None:
    """What came in time is used, and the late one rests."""

    class Late(Scripted):
        async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
            await super().propose(queries)
            await asyncio.Event().wait()
            raise AssertionError

    late = Late("late", 4)
    choice = ChoiceDrafter(free=[Scripted("good", 2)], paid=[late], patience_seconds=0.01)
    for length in range(1, 11):
        query = DraftQuery(seq_id=1, token_ids=list(range(length)), num_wanted=K, sampling=GREEDY)
        drafts = await choice.propose([query])
        assert drafts[1].drafter == "good"
    assert 1 <= late.num_calls < 6


async def test_cancelling_reaches_the_members() -> None:
    """The engine's own deadline ends the call, and is not taken for a member's failure."""
    cancelled = asyncio.Event()

    class Waiting(Scripted):
        async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
            del queries
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return {}

    choice = ChoiceDrafter(free=[], paid=[Waiting("waiting", 0)], patience_seconds=60.0)
    query = DraftQuery(seq_id=1, token_ids=[0], num_wanted=1, sampling=GREEDY)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await choice.propose([query])
    assert cancelled.is_set()


async def test_each_is_asked_only_for_what_fits_its_context() -> None:
    """The choice reaches as far as its longest member; a shorter one is asked for less, or not."""
    short = Scripted("short", 4, context_limit=6)
    longer = Scripted("longer", 1, context_limit=50)
    choice = choice_of([short, longer], [])
    assert choice.context_limit == 50
    target = Target(choice, Clock())
    target.begin(1, num_tokens=4)
    for _ in range(10):
        await target.step()
    assert short.asked[0] == (4, 2)
    assert all(length + num_wanted <= 6 for length, num_wanted in short.asked)
    assert longer.asked[-1][0] > 6
    assert choice_of([short, NgramDrafter()], []).context_limit is None


async def test_release_leaves_nothing() -> None:
    """Neither in the choice nor in its members; unknown ids are no error."""
    clock = Clock()
    drafters = [Scripted("ngram", 1), Scripted("model", 3, seconds=0.1, clock=clock)]
    choice = choice_of(drafters[:1], drafters[1:], clock)
    target = Target(choice, clock)
    for seq_id in range(5):
        target.begin(seq_id)
    await target.run(10)
    choice.release(range(10))
    assert not choice._proposals
    assert all(member.grades.num_sequences == 0 for member in choice._members)
    assert not any(drafter.held for drafter in drafters)


async def test_its_name_names_all() -> None:
    """Whoever reads metrics sees who was there."""
    model = FakeModel()
    choice = choice_of([NgramDrafter()], [SameDrafter(model), SilentDrafter(model)])
    assert choice.name == "ngram+SameDrafter+SilentDrafter"


async def test_a_drafter_that_has_nothing_for_a_sequence_is_asked_less() -> None:
    """As many times in a row as reading a long context may take, then seldom."""
    clock = Clock()
    silent = Scripted("silent", 0, seconds=0.5, clock=clock)
    silent._draft = lambda _: Draft()  # type: ignore[method-assign]
    await run([Scripted("ngram", 1)], [silent], clock, num_steps=640)
    assert silent.num_calls <= members.MAX_EMPTY * 640 // members.EMPTY_REST


async def test_grades_count_only_what_is_known() -> None:
    """A proposal longer than what followed is right so far; its first wrong token is the last."""
    right_so_far, wrong = Grades(), Grades()
    for _ in range(200):
        right_so_far.observe(1, Draft((1, 2, 3, 4)), [1])
        wrong.observe(1, Draft((1, 2, 3, 4)), [1, 9, 3, 4])
    assert right_so_far.expected(1, 1) > 0.9
    assert 0.4 < wrong.expected(1, 1) < 0.6
    assert wrong.expected(1, 4) == pytest.approx(
        sum(wrong.expected(1, 1) ** n for n in range(1, 5))
    )
