"""Which engine takes a request, from loads alone."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.routing import Need, Sent, Standing, choose, estimate, need_of, num_cached
from cluster.errors import Overloaded, TargetUnavailable
from cluster.messages import EngineLoad
from cluster.prefixes import DIGEST_TOKENS, prefix_digests
from cluster.request import StoppingParams
from tests.harness import make_request

PLACES = 4
LOAD = EngineLoad(
    running=0,
    waiting=0,
    free_blocks=64,
    step_id=1,
    num_blocks=64,
    max_num_seqs=PLACES,
    max_num_waiting=8,
    max_prompt_rows=16,
    max_num_batched_tokens=128,
    base_seconds=0.02,
    row_seconds=0.001,
    tokens_per_step=2.0,
    answer_tokens=100.0,
)
PROMPT = tuple(range(10 * DIGEST_TOKENS))
NEED = Need(num_tokens=len(PROMPT) + 1, digests=prefix_digests(PROMPT))

loads = st.builds(
    lambda running, waiting, prompt_tokens, free, base, row: replace(
        LOAD,
        running=running,
        waiting=waiting,
        prompt_tokens=prompt_tokens,
        free_blocks=free,
        base_seconds=base,
        row_seconds=row,
    ),
    st.integers(0, PLACES),
    st.integers(0, 20),
    st.integers(0, 5000),
    st.integers(0, 64),
    st.floats(0, 1),
    st.floats(0, 0.1),
)
standings = st.builds(
    lambda load, num_sent, sent_tokens, count: Standing(
        engine_id="engine",
        load=load,
        num_sent=num_sent,
        sent_tokens=sent_tokens,
        prefixes=frozenset(NEED.digests[:count]),
    ),
    loads,
    st.integers(0, 8),
    st.integers(0, 1000),
    st.integers(0, 10),
)


def standing(name: str, *, num_digests: int = 0, num_sent: int = 0, **load: float) -> Standing:
    """An engine that holds the first digests of PROMPT."""
    return Standing(
        engine_id=name,
        load=replace(LOAD, **load),  # type: ignore[arg-type]
        prefixes=frozenset(NEED.digests[:num_digests]),
        num_sent=num_sent,
    )


def named(engines: list[Standing]) -> list[Standing]:
    return [replace(each, engine_id=f"engine-{place}") for place, each in enumerate(engines)]


@given(st.lists(standings, max_size=8))
def test_whom_it_picks_is_open_and_none_is_done_sooner(engines: list[Standing]) -> None:
    """Never a full engine, never none that is there, and never one that another beats."""
    engines = named(engines)
    open_to = [each for each in engines if not each.is_full]
    if not open_to:
        with pytest.raises(Overloaded if engines else TargetUnavailable):
            choose(engines, NEED)
        return
    chosen = choose(engines, NEED)
    assert chosen in open_to
    soonest = min(estimate(each, NEED).last_seconds for each in open_to)
    assert estimate(chosen, NEED).last_seconds == soonest


@given(st.lists(standings, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_choice_depends_on_nothing_but_the_loads(
    engines: list[Standing], order: object
) -> None:
    """No chance and no order of engines has a say: every gateway decides alike."""
    engines = [replace(each, load=replace(each.load, max_num_waiting=0)) for each in named(engines)]
    shuffled = list(engines)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(engines, NEED) == choose(shuffled, NEED)


@given(standings, st.integers(1, 5), st.integers(0, 500))
def test_more_before_a_request_never_has_it_done_sooner(
    engine: Standing, more: int, tokens: int
) -> None:
    """Each sequence and each prompt token ahead can only take time."""
    busier = replace(
        engine, num_sent=engine.num_sent + more, sent_tokens=engine.sent_tokens + tokens
    )
    before, after = estimate(engine, NEED), estimate(busier, NEED)
    assert after.place_seconds >= before.place_seconds
    assert after.last_seconds >= before.last_seconds
    assert 0 <= before.place_seconds <= before.turn_seconds <= before.least_seconds
    assert before.least_seconds <= before.last_seconds
    assert before.alone_seconds <= before.last_seconds


@given(standings, st.integers(0, 9))
def test_what_is_cached_is_time_saved(engine: Standing, count: int) -> None:
    """Holding more of a prompt never makes an engine slower with it."""
    digests = NEED.digests
    fewer = replace(engine, prefixes=frozenset(digests[:count]))
    more = replace(engine, prefixes=frozenset(digests[: count + 1]))
    assert num_cached(more, NEED) == (count + 1) * DIGEST_TOKENS
    assert estimate(more, NEED).last_seconds <= estimate(fewer, NEED).last_seconds


def test_a_prefix_goes_to_its_holder_until_the_queue_there_costs_more() -> None:
    """Affinity is worth what the prompt would take to compute again, and not a queue beyond it."""
    stranger = standing("a")
    for num_running in range(PLACES):
        holder = standing("b", num_digests=10, running=num_running)
        cheaper = estimate(holder, NEED).last_seconds < estimate(stranger, NEED).last_seconds
        assert choose([stranger, holder], NEED) is (holder if cheaper else stranger)
    assert choose([stranger, standing("b", num_digests=10)], NEED).engine_id == "b"
    queued = standing("b", num_digests=10, running=PLACES, waiting=4)
    assert choose([stranger, queued], NEED) is stranger


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 40))
def test_no_engine_is_left_out(num_engines: int, num_requests: int) -> None:
    """Requests that come at once are spread: no engine gets two more than another of its kind."""
    engines = named([standing("", max_num_waiting=0)] * num_engines)
    counts = dict.fromkeys((each.engine_id for each in engines), 0)
    for _ in range(num_requests):
        at = engines.index(choose(engines, NEED))
        counts[engines[at].engine_id] += 1
        engines[at] = replace(
            engines[at],
            num_sent=engines[at].num_sent + 1,
            sent_tokens=engines[at].sent_tokens + NEED.num_tokens,
        )
    assert max(counts.values()) - min(counts.values()) <= 1


def test_one_prefix_has_one_home_before_anyone_holds_it() -> None:
    """Idle engines of one kind: a prefix always has the same, and prefixes are spread over all."""
    engines = named([standing("")] * 4)
    homes = {}
    for first in range(64):
        need = Need(num_tokens=99, digests=prefix_digests([first] * 3 * DIGEST_TOKENS))
        homes[first] = choose(engines, need).engine_id
        assert choose(reversed(engines), need).engine_id == homes[first]
    assert len(set(homes.values())) == len(engines)


def test_x78_an_answer_past_the_deadline_is_refused_with_when_to_try_again() -> None:
    """A request that would be answered too late is turned away at once, and no other is."""
    busy = standing("a", running=PLACES, waiting=4)
    when = estimate(busy, NEED)
    assert choose([busy], replace(NEED, deadline_seconds=when.last_seconds + 0.01)) is busy
    with pytest.raises(Overloaded) as refused:
        choose([busy], replace(NEED, deadline_seconds=when.last_seconds - 1.5))
    assert refused.value.retry_seconds == pytest.approx(1.5)
    assert refused.value.waiting == 4
    assert "deadline" in str(refused.value)


def test_what_only_a_short_answer_can_keep_is_the_clients_to_try() -> None:
    """A deadline that the usual answer misses on an idle engine is not for lack of room.

    But what is certain to be asked for must be there in time.
    """
    idle, busy = standing("a"), standing("a", running=PLACES, waiting=4)
    soon = estimate(idle, NEED).alone_seconds - 0.01
    assert choose([idle], replace(NEED, deadline_seconds=soon)) is idle
    for engine, least_tokens in ((busy, 0), (idle, 100)):
        with pytest.raises(Overloaded):
            choose([engine], replace(NEED, deadline_seconds=soon, least_tokens=least_tokens))


def test_a_deadline_is_not_held_against_a_guess() -> None:
    """An engine that has not told how fast it is takes whom it has a place for."""
    new = standing("a", base_seconds=0.0, row_seconds=0.0)
    need = replace(NEED, deadline_seconds=0.01)
    assert choose([new], need) is new
    with pytest.raises(Overloaded):
        choose([replace(new, num_sent=PLACES)], need)


@pytest.mark.parametrize(
    ("stopping", "least_tokens"),
    [
        (StoppingParams(max_tokens=50, ignore_eos=True), 40),
        (StoppingParams(max_tokens=50, ignore_eos=True, stop=("end",)), 0),
        (StoppingParams(max_tokens=50, ignore_eos=True, stop_token_ids=(7,), min_tokens=30), 20),
        (StoppingParams(max_tokens=50, min_tokens=5), 0),
        (StoppingParams(ignore_eos=True), 0),
    ],
)
def test_how_long_an_answer_is_at_least(stopping: StoppingParams, least_tokens: int) -> None:
    """As far as nothing can end it, less what is there already."""
    request = replace(make_request([1, 2]), stopping=stopping, output_token_ids=(3,) * 10)
    assert need_of(request).least_tokens == least_tokens


def test_a_row_of_a_long_prompt_costs_more_than_one_of_a_short_prompt() -> None:
    """A row that looks back on as many keys as a row is worth costs two."""
    engine = standing("a", running=1, keys_per_row=100)
    short, long = (estimate(engine, Need(num_tokens=count)).last_seconds for count in (101, 201))
    steps = math.ceil(201 * 2 / 16) - math.ceil(101 * 1.5 / 16)
    assert long - short == pytest.approx(steps * (0.02 + 17 * 0.001))


def test_full_queues_say_when_there_should_be_room() -> None:
    """All bounds reached: refused here, with the time in which the first place comes free."""
    full = standing("a", running=PLACES, waiting=8)
    with pytest.raises(Overloaded) as refused:
        choose([full, replace(full, engine_id="b", num_sent=3)], NEED)
    assert (refused.value.waiting, refused.value.limit) == (8, 8)
    one_place = 100 * (0.02 + PLACES * 0.001) / 2.0 / PLACES
    assert refused.value.retry_seconds == pytest.approx(one_place)


def test_where_memory_ends_before_places_the_wait_is_for_memory() -> None:
    """An engine whose blocks are used up has as many places as sequences run in it."""
    tight = standing("a", running=2, waiting=1, free_blocks=0)
    assert estimate(tight, NEED).place_seconds > 0
    assert estimate(standing("a", running=2, waiting=1), NEED).place_seconds == 0


def test_what_was_sent_counts_until_the_engine_counts_it() -> None:
    """Neither twice nor not at all, whatever the order of answers and loads."""
    sent = Sent()
    sent.expect("a", 10)
    sent.expect("b", 5)
    sent.told()
    assert (sent.num_sequences, sent.num_tokens) == (2, 15)
    sent.taken("a")
    assert sent.num_sequences == 2
    sent.told()
    assert (sent.num_sequences, sent.num_tokens) == (1, 5)
    sent.forget("b")
    sent.taken("b")
    sent.told()
    assert sent.num_sequences == 0


def test_a_request_that_moves_takes_what_is_left_of_it() -> None:
    """Tokens that came are prompt now, and not to come again."""
    request = make_request(PROMPT, max_tokens=20, output_token_ids=(1, 2, 3))
    need = need_of(request)
    assert (need.num_tokens, need.max_tokens) == (len(PROMPT) + 3, 17)
    assert need.digests == NEED.digests
