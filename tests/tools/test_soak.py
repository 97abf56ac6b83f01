"""`drafthouse soak`: a mixed load over a real wire, and whether anything grows."""

import random
from collections import Counter

import pytest
from rich.console import Console

from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools.drill.client import Gateways, Refused, read_error
from cluster.tools.drill.faults import Part
from cluster.tools.drill.leaks import MIB, Rest, Samples, Trend, leaks, rest_of, trend_of
from cluster.tools.drill.mix import BAD, Mix, Order, Sort
from cluster.tools.drill.open_load import End, Ended, OpenLoad, send
from cluster.tools.drill.processes import Measure
from cluster.tools.drill.questions import Answer, Question
from cluster.tools.drill.soak_record import SoakOutcome
from cluster.tools.page import Page
from tests.checkpoints import make_tokenizer
from tests.wire import PROMPT, Wire, request, served

QUESTION = Question(PROMPT, seed=1, temperature=0.0, max_tokens=40)
ANSWER = Answer(tuple(range(20, 60)), (-0.5,) * 40)
REST = Rest(
    running=0,
    waiting=0,
    kv_usage=0,
    draft_sequences=0,
    processes={"engine": 2},
    descriptors={"engine": 100.0},
)
FLAT = Trend(Part.ENGINE, 7, 600.0, 400.0 * MIB, 0.0, 1.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small one."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def gateways(*wires: Wire) -> Gateways:
    """A client that knows these servers."""
    addresses = tuple(f"127.0.0.1:{wire.port}" for wire in wires)

    async def look_up() -> tuple[str, ...]:
        return addresses

    client = Gateways(look_up)
    client.know(addresses)
    return client


def mix(**shares: float) -> Mix:
    """Of one question whose answer is known."""
    return Mix([QUESTION], [ANSWER], answer_seconds=1.0, seed=0, shares=shares or None)


@pytest.mark.wire
@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__.strip("_"))
async def test_every_bad_input_is_one(tokenizer: Tokenizer, spoil: object) -> None:
    """Each is refused as invalid by the real reader: what is counted as bad input is."""
    message = request(token_ids=PROMPT)
    spoil(message)  # type: ignore[operator]
    async with served(tokenizer) as wire:
        client = gateways(wire)
        ended = await send(client, Order(sort=Sort.BAD, message=message, expected=ANSWER))
        await client.close()
    assert (ended.end, ended.begun, ended.expected) == (End.INVALID, False, True)


@pytest.mark.wire
async def test_the_load_knows_how_each_request_ended(tokenizer: Tokenizer) -> None:
    """Answers, cancels and bad input over a real wire, each counted as what it was."""
    async with served(tokenizer, ANSWER.token_ids) as wire:
        client = gateways(wire)
        load = OpenLoad(client, mix(plain=0.4, cancel=0.3, bad=0.3))
        await load.run(rate=200.0, seconds=0.3)
        await client.close()
    assert all(each.expected for each in load.ended), load.messages
    assert {each.end for each in load.ended} == {End.ANSWERED, End.CANCELLED, End.INVALID}
    assert load.num_open == 0
    answered = [each for each in load.ended if each.end is End.ANSWERED]
    assert all(each.num_wrong for each in answered), "the fake's logprobs are others: all differ"


def test_what_has_begun_is_not_refused_any_more() -> None:
    """A refusal in the middle of an answer is a broken promise, and so is one of bad input."""
    assert Ended(Sort.PLAIN, End.REFUSED, 0.01, begun=False).expected
    assert not Ended(Sort.PLAIN, End.REFUSED, 0.01, begun=True).expected
    assert not Ended(Sort.BAD, End.REFUSED, 0.01, begun=False).expected
    assert not Ended(Sort.PLAIN, End.LATE, 0.01, begun=False).expected


def test_a_mix_has_what_it_is_to_have() -> None:
    """Every order's expectation is as long as what it asks for, and shares are kept."""
    drawn = [mix().draw() for _ in range(3)]
    assert drawn[0].message == drawn[1].message, "by the seed"
    several = mix()
    orders = [several.draw() for _ in range(800)]
    for order in orders:
        length = order.message.stopping.max_tokens
        assert order.expected.token_ids == ANSWER.token_ids[:length]
        assert order.cancel_after is None or order.cancel_after < length
    sorts = Counter(order.sort for order in orders)
    assert abs(sorts[Sort.PLAIN] / 800 - 0.5) < 0.05
    assert abs(sorts[Sort.BAD] / 800 - 0.1) < 0.03


def test_an_error_of_no_call_is_a_connection_that_broke() -> None:
    """Silence for too long is as good as a broken connection."""
    told = read_error(TimeoutError())
    assert not isinstance(told, Refused)


@pytest.mark.parametrize(
    ("growth", "noise", "grows"),
    [(0.0, 2.0, False), (0.01, 2.0, False), (0.1, 2.0, True), (0.05, 40.0, False)],
)
def test_a_leak_is_told_from_noise(growth: float, noise: float, *, grows: bool) -> None:
    """MiB a second over ten minutes, under noise of so many MiB; warming up is no leak."""
    rng = random.Random(1)
    times = [float(second) for second in range(600)]
    memories = [
        MIB * (400 - 200 * (second < 100) + growth * second + rng.gauss(0, noise))
        for second in range(600)
    ]
    trend = trend_of(Part.ENGINE, 7, times, memories)
    assert trend.grows == grows
    if not grows and noise < 10:
        assert abs(trend.slope / MIB - growth) < 0.005


def test_only_processes_that_were_watched_for_long_have_a_trend() -> None:
    """One that a fault ended early says nothing, whatever it did."""
    samples = Samples()
    for second in range(30):
        measures = [Measure(Part.ENGINE, 1, 100 * MIB, 10)]
        if second < 5:
            measures.append(Measure(Part.ENGINE, 2, second * 100 * MIB, 10))
        samples.add(second, measures)
    assert [(trend.pid, trend.slope) for trend in samples.trends()] == [(1, 0.0)]


def test_nothing_leaks_from_a_cluster_that_is_where_it_began() -> None:
    """A few descriptors more are connections that are open for a moment."""
    assert leaks(REST, REST, [FLAT]) == []
    after = Rest(**REST.as_json() | {"descriptors": {"engine": 104.0}})  # type: ignore[arg-type]
    assert leaks(REST, after, [FLAT]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"running": 1},
        {"waiting": 1},
        {"kv_usage": 0.1},
        {"draft_sequences": 2},
        {"processes": {"engine": 3}},
        {"processes": {}},
        {"descriptors": {"engine": 120.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_leak_is_named(changes: dict[str, object]) -> None:
    """Slots, blocks, drafts, processes and descriptors, each by itself."""
    after = Rest(**REST.as_json() | changes)  # type: ignore[arg-type]
    assert len(leaks(REST, after, [FLAT])) == 1
    growing = Trend(Part.ENGINE, 7, 600.0, 400.0 * MIB, MIB, 0.01 * MIB)
    assert leaks(REST, REST, [growing]) == ["memory, engine 7: 60.00 MiB a minute"]


def test_the_cluster_at_rest_is_read_from_its_metrics() -> None:
    """The fullest engine counts for blocks, all of them for sequences."""
    page = Page(
        'drafthouse_sequences{state="running",replica="a"} 1\n'
        'drafthouse_sequences{state="running",replica="b"} 2\n'
        'drafthouse_sequences{state="waiting",replica="b"} 4\n'
        'drafthouse_kv_usage_ratio{replica="a"} 0.25\n'
        'drafthouse_kv_usage_ratio{replica="b"} 0.5\n'
        'drafthouse_draft_sequences{pool="p"} 3\n'
    )
    measures = [Measure(Part.ENGINE, 1, 5, 10), Measure(Part.ENGINE, 2, 5, 20)]
    rest = rest_of(page, measures)
    assert (rest.running, rest.waiting, rest.kv_usage, rest.draft_sequences) == (3, 4, 0.5, 3)
    assert (rest.processes, rest.descriptors) == ({"engine": 2}, {"engine": 15.0})
    assert not rest.is_idle
    assert REST.is_idle


def outcome(*ended: Ended, faults: tuple[str, ...] = ()) -> SoakOutcome:
    """A soak in which nothing leaked."""
    return SoakOutcome(
        seconds=60.0,
        load=1.5,
        capacity=10.0,
        ended=ended,
        faults=faults,
        before=REST,
        after=REST,
        trends=[FLAT],
        leaks=(),
    )


def test_a_soak_fails_by_one_wrong_token_or_one_wrong_end() -> None:
    """And a gateway's end is an excuse only where there were faults."""
    good = Ended(Sort.PLAIN, End.ANSWERED, 1.0, begun=True)
    assert outcome(good).passed
    assert not outcome(good, Ended(Sort.PLAIN, End.ANSWERED, 1.0, begun=True, num_wrong=1)).passed
    assert not outcome(good, Ended(Sort.PLAIN, End.FAILED, 1.0, begun=True)).passed
    gone = Ended(Sort.PLAIN, End.DISCONNECTED, 1.0, begun=True)
    assert not outcome(gone).passed
    assert outcome(gone, faults=("gateway kill",)).passed


def test_a_soak_says_how_quick_refusals_were_and_which_deadlines_were_met() -> None:
    """A request that was refused at once has missed no deadline."""
    found = outcome(
        Ended(Sort.PLAIN, End.REFUSED, 0.01, begun=False),
        Ended(Sort.DEADLINE, End.REFUSED, 0.03, begun=False),
        Ended(Sort.DEADLINE, End.ANSWERED, 1.0, begun=True),
        Ended(Sort.DEADLINE, End.LATE, 2.0, begun=True),
    )
    assert found.deadlines_met == 0.5
    assert not found.passed
    assert found.complaints == ["only 50.0% of the deadlines of accepted requests are met"]
    slow = outcome(*[Ended(Sort.PLAIN, End.REFUSED, 0.2, begun=False)] * 3)
    assert slow.complaints == ["of refusals one in a hundred takes 200 ms"]
    data = found.as_json()
    assert data["refusal_seconds"]["p50"] == pytest.approx(0.02)  # type: ignore[index]
    console = Console(width=160, record=True, quiet=True)
    console.print(found)
