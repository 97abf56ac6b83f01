"""`drafthouse drill`: what is harmed, what is compared, and what is said of it."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.config import draft_models, parse_config
from cluster.errors import ConfigurationError
from cluster.tools.drill import run
from cluster.tools.drill.client import Disconnected, Failed, Piece, Refused
from cluster.tools.drill.faults import FAULTS, LAST, Census, Fault, Harm, Part, Planner, find
from cluster.tools.drill.layout import (
    configured,
    num_draft_supervisors,
    num_draft_workers,
    spread,
)
from cluster.tools.drill.questions import Answer, Question, make_questions
from cluster.tools.drill.record import DrillOutcome, Record
from cluster.tools.drill.run import Drill, DrillPlan
from cluster.tools.drill.streams import Check, Counts, Lane, Streams
from tests.wire import until

WHOLE: Census = dict.fromkeys(Part, 2)
ANSWER = Answer((1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4))
QUESTION = Question((5, 6), seed=0, temperature=0.0, max_tokens=4)
FIRST, REST = Piece((1, 2), (-0.1, -0.2)), Piece((3, 4), (-0.3, -0.4))
WRONG = Piece((3, 9), (-0.3, -0.4))

Step = Piece | Exception


class ScriptedClient:
    """Plays one script an attempt, the last one for ever; a step may also be something to do."""

    def __init__(self, *scripts: list[Step]) -> None:
        self._scripts = list(scripts)
        self.num_asked = 0

    async def ask(self, question: Question) -> AsyncGenerator[Piece, None]:
        """The pieces, or the error, in order."""
        del question
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        self.num_asked += 1
        for step in script:
            await asyncio.sleep(0.001)
            if isinstance(step, Exception):
                raise step
            yield step


async def played(*scripts: list[Step]) -> Streams:
    """One lane that ends with its first answer, or what takes its place."""
    client = ScriptedClient(*scripts)
    streams = Streams(client, [QUESTION], [ANSWER], num_lanes=1)
    streams.end()
    await streams.run()
    return streams


class FakeFleet:
    """Everything is there at once; `act` is what a fault does."""

    def __init__(self, act: Callable[[Fault], None] = lambda _: None) -> None:
        self.injected: list[Fault] = []
        self.never_whole: set[Fault] = set()
        self._act = act

    def census(self) -> Census:
        """Two of each."""
        return WHOLE

    def inject(self, fault: Fault, victim: int) -> None:
        """Note it."""
        assert 0 <= victim < 2
        self.injected.append(fault)
        self._act(fault)

    def missing(self) -> str | None:
        """Nothing, unless the fault is one that stays."""
        return "an engine" if self.injected[-1] in self.never_whole else None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for here."""
    monkeypatch.setattr(run, "POLL_SECONDS", 0.005)


def plan(*kinds: Fault, num_faults: int, **fields: float) -> DrillPlan:
    """Without the times that a real cluster needs."""
    times = {"settle_seconds": 0.01, "last_seconds": 0.01, "recovery_seconds": 0.1} | fields
    return DrillPlan(kinds=kinds, num_faults=num_faults, **times)  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from(Part), st.integers(0, 3)), st.integers(0, 9))
def test_every_drawn_fault_has_a_victim_and_leaves_one_target_alive(
    census: dict[Part, int], seed: int
) -> None:
    """Whatever is there: a target is never harmed when it is the last, a gateway neither."""
    planner = Planner(list(FAULTS.values()), seed=seed)
    for _ in range(10):
        try:
            fault, victim = planner.draw(census)
        except ConfigurationError:
            assert not any(each.possible(census) for each in FAULTS.values())
            return
        assert 0 <= victim < census[fault.part]
        if fault.part in {Part.ENGINE, Part.RANK, Part.TARGET, Part.TARGET_NODE}:
            assert census[Part.ENGINE] > 1
        if fault.part in {Part.TARGET_NODE, Part.EDGE_NODE}:
            assert census[fault.part] > 1
        if fault.cuts:
            assert census[Part.GATEWAY] > 1


@given(st.integers(0, 99))
def test_every_kind_comes_before_any_comes_again(seed: int) -> None:
    """In any stretch of as many faults as there are kinds each is there once."""
    planner = Planner(list(FAULTS.values()), seed=seed)
    drawn = [planner.draw(WHOLE)[0].name for _ in range(3 * len(FAULTS))]
    for begin in range(0, len(drawn), len(FAULTS)):
        assert set(drawn[begin : begin + len(FAULTS)]) == set(FAULTS)


def test_a_seed_gives_the_same_faults() -> None:
    """What was found can be done again; another seed is another order."""

    def drawn(seed: int) -> list[tuple[Fault, int]]:
        planner = Planner(list(FAULTS.values()), seed=seed)
        return [planner.draw(WHOLE) for _ in range(40)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_a_fault_that_is_impossible_now_waits_for_its_time() -> None:
    """It is drawn once there is something to harm, and not put off for ever."""
    planner = Planner([FAULTS["rank kill"], FAULTS["draft worker kill"]], seed=0)
    without = WHOLE | {Part.RANK: 0}
    assert {planner.draw(without)[0].name for _ in range(5)} == {"draft worker kill"}
    assert "rank kill" in {planner.draw(WHOLE)[0].name for _ in range(2)}


def test_faults_are_found_by_name_and_unknown_ones_are_named() -> None:
    """A typo is an error that says what there is; no name is all of them, the head at last."""
    assert find(["engine kill", "head node kill"]) == (FAULTS["engine kill"], LAST)
    assert find([]) == (*FAULTS.values(), LAST)
    with pytest.raises(ConfigurationError, match="no fault 'engine melt'; there are: engine kill"):
        find(["engine melt"])


@pytest.mark.parametrize(
    ("pieces", "changed", "lost"),
    [
        ([FIRST, REST], 0, 0),
        ([FIRST], 0, 2),
        ([FIRST, WRONG], 1, 0),
        ([FIRST, Piece((3, 4), (-0.3, -0.5))], 1, 0),
        ([FIRST, REST, Piece((5,), (-0.5,))], 1, 0),
        ([FIRST, Piece((3, 4), ())], 2, 0),
    ],
)
def test_a_check_finds_every_token_that_is_not_what_it_must_be(
    pieces: list[Piece], changed: int, lost: int
) -> None:
    """Another token, another logprob, one too many, one too few, and none said of how likely."""
    check = Check(ANSWER)
    assert sum(check.take(piece) for piece in pieces) == changed
    assert check.num_lost == lost


async def test_an_exact_answer_is_counted_as_one() -> None:
    """Nothing else is."""
    streams = await played([FIRST, REST])
    assert streams.counts == Counts(ended=1, tokens=4)


async def test_a_connection_that_breaks_is_made_again_and_everything_is_compared_again() -> None:
    """The client begins anew at another gateway; a token that is another then is found."""
    streams = await played([FIRST, Disconnected("gone")], [FIRST, REST])
    assert streams.counts == Counts(ended=1, tokens=6, reconnected=1)
    streams = await played([FIRST, Disconnected("gone")], [FIRST, WRONG])
    assert (streams.counts.changed, streams.counts.lost) == (1, 0)


@pytest.mark.parametrize(
    "error", [Failed("INTERNAL", "a fault"), Refused("UNAVAILABLE", "gone", retry_seconds=0.001)]
)
async def test_a_stream_that_ends_with_an_error_is_broken(error: Exception) -> None:
    """Also where the server says when to come again: what has begun has to end."""
    streams = await played([FIRST, error])
    assert streams.counts == Counts(broken=1, tokens=2)
    assert str(error) in streams.messages[0]


async def test_who_is_turned_away_before_the_first_token_comes_again() -> None:
    """No stream had begun, so none broke."""
    full = Refused("RESOURCE_EXHAUSTED", "full", retry_seconds=0.001)
    streams = await played([full], [Disconnected("draining")], [FIRST, REST])
    assert streams.counts == Counts(ended=1, tokens=4, turned_away=2)


def test_a_pause_is_measured_from_the_fault_and_until_now() -> None:
    """What came before the fault does not shorten it; a stream that still waits counts as well."""
    now = 0.0
    lane = Lane(lambda: now)
    now = 5.0
    lane.mark()
    assert not lane.moved_on
    now = 6.5
    assert lane.pause_until_now == 1.5
    lane.token()
    now = 7.0
    lane.token()
    assert lane.moved_on
    assert lane.pause_until_now == lane.longest_pause == 1.5


async def test_a_drill_says_what_each_fault_did() -> None:
    """An error under one fault is that fault's, and the whole has not passed."""
    scripts: Iterator[list[Step]] = iter([])
    client = ScriptedClient([FIRST, REST])

    def act(fault: Fault) -> None:
        nonlocal scripts
        if fault.name == "router kill":
            client._scripts.insert(0, [FIRST, Failed("INTERNAL", "a fault")])

    fleet = FakeFleet(act)
    streams = Streams(client, [QUESTION], [ANSWER], num_lanes=2)
    kinds = (FAULTS["router kill"], FAULTS["engine kill"], LAST)
    outcome = await Drill(plan(*kinds, num_faults=3), fleet, streams).run()
    assert [record.name for record in outcome.records][-1] == LAST.name
    assert {record.name: record.broken for record in outcome.records} == {
        "router kill": 1,
        "engine kill": 0,
        LAST.name: 0,
    }
    assert not outcome.passed
    assert outcome.messages == ("broken: INTERNAL: a fault",)


async def test_a_drill_without_harm_passes_with_a_row_for_each_kind() -> None:
    """Its table and its JSON name every kind, with the pauses that clients had."""
    streams = Streams(ScriptedClient([FIRST, REST]), [QUESTION], [ANSWER], num_lanes=2)
    kinds = (FAULTS["engine kill"], FAULTS["gateway kill"])
    outcome = await Drill(plan(*kinds, num_faults=4), FakeFleet(), streams).run()
    assert outcome.passed
    assert Counter(record.name for record in outcome.records) == dict.fromkeys(
        (kind.name for kind in kinds), 2
    )
    assert all(record.pause_seconds > 0 for record in outcome.records)
    console = Console(width=160, record=True, file=None, quiet=True)
    console.print(outcome)
    data = outcome.as_json()
    assert [kind["name"] for kind in data["kinds"]] == [  # type: ignore[attr-defined]
        "engine kill",
        "gateway kill",
    ]
    assert data["passed"] is True


async def test_a_cluster_that_does_not_recover_ends_the_drill() -> None:
    """No further fault is done to it; the outcome says what was missing."""
    fleet = FakeFleet()
    fleet.never_whole.add(FAULTS["engine kill"])
    streams = Streams(ScriptedClient([FIRST, REST]), [QUESTION], [ANSWER], num_lanes=1)
    drill = Drill(plan(FAULTS["engine kill"], num_faults=9), fleet, streams)
    outcome = await drill.run()
    [record] = outcome.records
    assert (record.whole_seconds, record.missing) == (None, "an engine")
    assert not outcome.passed


async def test_a_stream_that_hangs_fails_the_drill() -> None:
    """A cluster that looks whole and gives a client no token has not recovered."""
    client = ScriptedClient([FIRST, REST])
    silence = asyncio.Event()

    class Hanging(ScriptedClient):
        async def ask(self, question: Question) -> AsyncGenerator[Piece, None]:
            async for piece in client.ask(question):
                yield piece
                await silence.wait()

    streams = Streams(Hanging([]), [QUESTION], [ANSWER], num_lanes=1)
    drill = Drill(plan(FAULTS["router kill"], num_faults=3), FakeFleet(), streams)
    running = asyncio.create_task(drill.run())
    await until(lambda: bool(drill._records))
    silence.set()
    outcome = await running
    [record] = outcome.records
    assert record.missing == "a stream waits for its next token"
    assert not outcome.passed


@pytest.mark.parametrize(("name", "broken"), [("engine kill", 1), ("gateway kill", 0)])
def test_a_broken_connection_is_excused_only_where_the_gateway_itself_went(
    name: str, broken: int
) -> None:
    """Under any other fault a client must not notice more than a pause."""
    record = Record(
        name=name,
        num_in_flight=8,
        counts=Counts(reconnected=1),
        pause_seconds=0.1,
        whole_seconds=1.0,
    )
    outcome = DrillOutcome(records=[record], num_streams=8, seconds=1.0, counts=record.counts)
    assert record.broken == broken
    assert outcome.passed == (not broken)
    lost = replace(outcome, counts=Counts(lost=1))  # by an answer that ended after the last fault
    assert not lost.passed


def test_questions_are_different_and_half_of_them_sampled() -> None:
    """Prompts, lengths and seeds differ: no answer can pass for another's."""
    questions = make_questions(8, max_tokens=5)
    assert len({question.prompt_token_ids for question in questions}) == 8
    assert len({len(question.prompt_token_ids) for question in questions}) == 8
    assert Counter(question.temperature > 0 for question in questions) == {True: 4, False: 4}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_target_with_all_its_ranks_fills_its_node(ranks: int) -> None:
    """So every engine is on a node of its own, and removing one leaves the others."""
    base = configured("some/model", draft=None, tensor_parallel_size=ranks, tiny=True)
    config = spread(base, num_targets=3, host="127.0.0.1", http_port=1234, num_seqs=8)
    assert sum(bundle.get("target", 0) for bundle in config.target.bundles) == 1
    assert config.target.num_replicas == 3
    assert config.gateway.num_replicas == 2
    assert config.gateway.grpc_port == 0


@pytest.mark.parametrize("draft", ["some/draft", "ngram+some/draft"])
def test_draft_workers_are_on_edge_nodes_one_on_each(draft: str) -> None:
    """Also where an n-gram drafter is beside them; the fleet knows how many to wait for."""
    base = configured("some/model", draft=draft, tensor_parallel_size=1, tiny=False)
    config = spread(base, num_targets=2, host="127.0.0.1", http_port=1234, num_seqs=8)
    [model] = draft_models(config.drafter)
    assert model.resources["draft"] == 1
    assert num_draft_workers(config) == num_draft_supervisors(config) == model.num_replicas == 2


def test_colocated_workers_are_counted_at_every_target() -> None:
    """They have no supervisor of their own."""
    base = configured("some/model", draft="some/draft", tensor_parallel_size=1, tiny=False)
    data = base.model_dump(mode="json")
    data["drafter"]["placement"] = "colocated"
    config = spread(parse_config(data), num_targets=3, host="127.0.0.1", http_port=1234, num_seqs=8)
    assert (num_draft_workers(config), num_draft_supervisors(config)) == (3, 0)


def test_whoever_has_no_draft_model_has_no_draft_workers_to_harm() -> None:
    """An n-gram drafter stays in the engines."""
    base = configured("some/model", draft="ngram", tensor_parallel_size=1, tiny=False)
    config = spread(base, num_targets=2, host="127.0.0.1", http_port=1234, num_seqs=8)
    assert config.drafter.kind == "ngram"
    assert not FAULTS["draft worker kill"].possible({Part.DRAFT: 0})
    assert FAULTS["draft worker kill"].harm is Harm.KILL
