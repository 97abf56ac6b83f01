"""What is concluded from requests with and without speculation. Pure: nothing is served."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tools.choosing.canary import Decision, Served, Stage, decide
from cluster.tools.choosing.resampling import ratio_interval, share_interval

ANSWER = tuple(range(40))


def group(number: int, token_seconds: float, *, seed: int, noise: float = 0.1) -> list[Served]:
    """Requests whose tokens take about so long."""
    chances = random.Random(seed)
    served = []
    for prompt in range(number):
        first = 0.2 * (1 + noise * chances.random())
        rest = 39 * token_seconds * (1 + noise * chances.uniform(-1, 1))
        served.append(
            Served(
                prompt=prompt,
                token_ids=ANSWER,
                first_token_seconds=first,
                seconds=first + rest,
                num_drafted=8,
                num_accepted=6,
            )
        )
    return served


def stage(canary: Sequence[Served], control: Sequence[Served], *, same: bool = True) -> Stage:
    """A half and half comparison."""
    reference = dict.fromkeys(range(1000), ANSWER)
    return Stage(0.5, canary, control, reference, must_be_same=same)


def test_faster_and_equal_is_promoted() -> None:
    """Tokens come in two thirds of the time and are the same."""
    found = stage(group(40, 0.02, seed=1), group(40, 0.03, seed=2))
    assert found.decision is Decision.PROMOTE
    assert found.token_time is not None
    assert found.token_time.low < 2 / 3 < found.token_time.high
    assert found.throughput is not None
    assert found.throughput.low > 1
    assert found.acceptance_rate == 0.75
    assert found.divergence.high < 0.1


def test_as_fast_is_no_reason_to_return() -> None:
    """Within the tolerance it is promoted: it takes nothing away."""
    found = stage(group(400, 0.03, seed=1), group(400, 0.03, seed=2))
    assert found.decision is Decision.PROMOTE


def test_slower_returns_and_says_by_how_much() -> None:
    """What was shown to be slower goes back."""
    found = stage(group(40, 0.036, seed=1), group(40, 0.03, seed=2))
    assert found.decision is Decision.RETURN
    assert found.token_time is not None
    assert found.token_time.value == pytest.approx(1.2, rel=0.05)
    assert any("time between tokens is 1.1" in each for each in found.objections())


def test_few_requests_decide_nothing() -> None:
    """Noise is not taken for a result."""
    found = stage(group(3, 0.03, seed=1, noise=0.9), group(3, 0.03, seed=2, noise=0.9))
    assert found.decision is Decision.UNDECIDED
    assert stage([], group(3, 0.03, seed=1)).decision is Decision.UNDECIDED


def test_one_other_token_returns_where_tokens_are_promised() -> None:
    """However fast it is. Where nothing is promised, the target's own restlessness counts."""
    fast, slow = group(40, 0.01, seed=1), group(40, 0.03, seed=2)
    fast[7] = replace(fast[7], token_ids=(*ANSWER[:-1], 99))
    assert stage(fast, slow).decision is Decision.RETURN
    assert stage(fast, slow, same=False).decision is Decision.PROMOTE
    all_other = [replace(each, token_ids=(*ANSWER[:-1], 99)) for each in fast]
    assert stage(all_other, slow, same=False).decision is Decision.RETURN


def test_failures_return() -> None:
    """A request that failed beside none that did without speculation is enough."""
    fast, slow = group(40, 0.01, seed=1), group(40, 0.03, seed=2)
    fast[3] = Served(prompt=3, error="UNAVAILABLE")
    assert stage(fast, slow).decision is Decision.RETURN
    slow[3] = Served(prompt=3, error="UNAVAILABLE")
    assert stage(fast, slow).decision is Decision.PROMOTE


def test_all_stages_count() -> None:
    """One that returns is the end; else the last one decides."""
    good = stage(group(40, 0.02, seed=1), group(40, 0.03, seed=2))
    bad = stage(group(40, 0.04, seed=1), group(40, 0.03, seed=2))
    unsure = stage(group(2, 0.03, seed=1, noise=0.9), group(2, 0.03, seed=2, noise=0.9))
    assert decide([unsure, good]) is Decision.PROMOTE
    assert decide([good, unsure]) is Decision.UNDECIDED
    assert decide([bad, good]) is Decision.RETURN
    assert decide([]) is Decision.UNDECIDED


def test_intervals_hold_as_often_as_they_say() -> None:
    """Of 300 comparisons with a known ratio, the interval holds it in about 95 of 100."""
    chances = random.Random(3)

    def drawn(mean: float) -> list[tuple[float, float]]:
        return [(chances.expovariate(1 / mean), 1.0) for _ in range(60)]

    held = 0
    for _ in range(300):
        interval = ratio_interval(drawn(2.0), drawn(1.0))
        assert interval is not None
        held += interval.low <= 2.0 <= interval.high
    assert held / 300 == pytest.approx(0.95, abs=0.04)


positive = st.lists(
    st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 100.0)), min_size=1, max_size=20
)


@given(own=positive, others=positive)
def test_an_interval_is_around_what_was_found(
    own: list[tuple[float, float]], others: list[tuple[float, float]]
) -> None:
    """Whatever there is, and the same every time; swapped, it is that of the inverse."""
    interval = ratio_interval(own, others)
    assert interval is not None
    assert 0 < interval.low <= interval.value <= interval.high
    assert interval == ratio_interval(own, others)
    swapped = ratio_interval(others, own)
    assert swapped is not None
    assert swapped.value == pytest.approx(1 / interval.value)


@given(total=st.integers(0, 500), part=st.floats(0, 1))
def test_a_share_is_between_none_and_all(total: int, part: float) -> None:
    """Also where nothing, or everything, was seen; more requests make it narrower."""
    count = round(part * total)
    interval = share_interval(count, total)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    more = share_interval(4 * count, 4 * total)
    if total:
        assert more.high - more.low < interval.high - interval.low


def test_nothing_has_no_ratio() -> None:
    """Neither without requests, nor without tokens."""
    assert ratio_interval([], [(1.0, 1.0)]) is None
    assert ratio_interval([(0.0, 1.0)], [(1.0, 1.0)]) is None
