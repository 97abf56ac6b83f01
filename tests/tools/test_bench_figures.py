"""From arrivals to percentiles and rates."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import TargetUnavailable
from cluster.messages import TokenDelta
from cluster.request import FinishReason
from cluster.tools.bench.figures import Rounds, Spent, Wave, median_ratio, percentile, percentiles
from cluster.tools.bench.real import ratio
from cluster.tools.bench.streams import Arrival, Stream

TIMES = st.lists(st.floats(0, 1e3), min_size=1, max_size=40)
ARRIVALS = st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 6)), min_size=1, max_size=20)


def stream(*arrivals: tuple[float, int], submitted: float = 0.0, **counts: int) -> Stream:
    """A stream whose tokens came at those moments, so many together."""
    return Stream(submitted, [Arrival(*arrival) for arrival in arrivals], **counts)  # type: ignore[arg-type]


@given(TIMES, st.floats(0, 100))
def test_percentile_is_that_of_numpy(values: list[float], rank: float) -> None:
    """Linear between neighbours, as numpy's default."""
    assert math.isclose(
        percentile(values, rank), float(np.percentile(values, rank)), rel_tol=1e-9, abs_tol=1e-9
    )


def test_percentiles_of_nothing_are_none() -> None:
    """An answer of one token has no time between tokens, and that is not zero."""
    assert percentiles([], (50, 95)) == {"p50": None, "p95": None}


@given(ARRIVALS)
def test_times_between_tokens_add_up_to_the_answer(parts: list[tuple[float, int]]) -> None:
    """X62: tokens that come together share the wait: one time a token, gap over tokens."""
    moments = itertools.accumulate(gap for gap, _ in parts)
    arrivals = list(zip(moments, (size for _, size in parts), strict=True))
    one = stream(*arrivals)
    times = list(one.inter_token_seconds())
    assert len(times) == one.num_tokens - arrivals[0][1]
    assert math.isclose(sum(times), arrivals[-1][0] - arrivals[0][0], abs_tol=1e-9)


def test_gaps_of_a_stretch_are_those_that_reach_into_it() -> None:
    """A gap that a disturbance begins or ends in counts as disturbed."""
    one = stream((1, 1), (2, 1), (4, 2), (7, 1), (8, 1))
    assert list(one.inter_token_seconds(3, 5)) == [1, 1, 3]
    assert list(one.inter_token_seconds(2, 4)) == [1, 1]


def test_a_stream_counts_what_its_deltas_bring() -> None:
    """Tokens, drafts and cached tokens over all deltas; the last one may be empty."""
    one = Stream(0.0)
    one.add(TokenDelta(request_id="a", token_ids=(5,), num_cached_tokens=7))
    one.add(TokenDelta(request_id="a", token_ids=(6, 7), num_drafted=4, num_accepted=1))
    one.add(TokenDelta(request_id="a", finish_reason=FinishReason.STOP))
    assert one.token_ids == [5, 6, 7]
    assert [arrival.num_tokens for arrival in one.arrivals] == [1, 2]
    assert (one.num_drafted, one.num_accepted, one.num_cached_tokens) == (4, 1, 7)


def test_a_failed_request_is_no_measurement() -> None:
    """A request that the engine could not answer ends the benchmark instead of being counted."""
    failed = TokenDelta(request_id="a", finish_reason=FinishReason.ERROR, error="no memory")
    with pytest.raises(TargetUnavailable, match="no memory"):
        Stream(0.0).add(failed)


def test_decode_leaves_the_prompts_out() -> None:
    """Counted from when the slowest first token is there, whatever came before."""
    wave = Wave((stream((1, 1), (2, 1), (4, 2)), stream((3, 1), (5, 3))), seconds=5)
    assert wave.num_tokens == 8
    assert wave.decode == (5, 2)


def test_a_goodput_is_of_the_time_with_all_requests_under_way() -> None:
    """From the last first token to the first last one: what comes later is of fewer requests."""
    wave = Wave((stream((1, 1), (4, 2), (6, 3), (9, 4)), stream((3, 1), (5, 3), (7, 2))), seconds=9)
    assert wave.together == (2 + 3 + 3 + 2, 4)
    assert Rounds(((wave,), (wave,))).goodput == 10 / 4
    short = Wave((stream((1, 1)), stream((3, 1), (5, 3))), seconds=5)
    assert short.together == (0, 0)
    assert Rounds(((short,),)).goodput == 5 / 5
    assert ratio(Rounds(((wave,),)), Rounds(((wave,),))) == 1
    assert ratio(Rounds(((wave,),)), Rounds(((short,),))) == (16 / 9) / (5 / 5)


def test_rates_are_medians_of_rounds() -> None:
    """One spoiled round of three changes no rate and no ratio."""
    answer = stream((0.5, 1), (1, 1))
    quick, slow = Wave((answer,), seconds=1), Wave((answer,), seconds=50)
    rounds = Rounds(((quick,), (slow,), (quick,)))
    assert rounds.rates == (2, 2 / 50, 2)
    assert rounds.rate == 2
    assert median_ratio(rounds.rates, (1.0, 1.0, 1.0)) == 2


def test_acceptance_is_over_steps_and_over_drafts() -> None:
    """Length: tokens an arrival; rate: accepted over drafted, and None where none was drafted."""
    drafted = stream((1, 1), (2, 3), (3, 1), num_drafted=8, num_accepted=2)
    plain = stream((1, 1), (2, 1))
    assert Rounds(((Wave((drafted,), 3),),)).acceptance_length == 5 / 3
    assert Rounds(((Wave((drafted,), 3),),)).acceptance_rate == 0.25
    assert Rounds(((Wave((plain,), 2),),)).acceptance_rate is None


def test_spent_adds_up() -> None:
    """The parts of a mean step are those of the sum, and together are the step."""
    one = Spent(2, draft=1.0, forward=4.0, sample=1.0, rest=2.0)
    assert one + one - one == one
    shown = (one + one).as_json()
    parts = [value for name, value in shown.items() if name not in ("num_steps", "step_seconds")]
    assert shown["num_steps"] == 4
    assert shown["step_seconds"] == sum(parts) == 4
