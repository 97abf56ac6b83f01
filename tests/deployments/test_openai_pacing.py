"""Joining deltas: fewer of them, none late, nothing lost. In virtual time."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Unavailable
from cluster.request import FinishReason
from cluster.text.stream import TextDelta
from deployments.openai_pacing import CHUNK_SECONDS, CHUNK_TOKENS, paced
from tests.virtual_time import run_virtually

Step = tuple[float, int, TextDelta]  # seconds before it, its answer, and itself


def token(place: int, **fields: object) -> TextDelta:
    """One token with its logprob and text."""
    return TextDelta(
        text=f"{place} ",
        token_ids=(place,),
        logprobs=(-float(place),),
        num_steps=1,
        **fields,  # type: ignore[arg-type]
    )


def run(steps: Sequence[Step], error: Exception | None = None) -> list[Step]:
    """What comes out, with the moment at which it does."""

    async def deltas() -> AsyncGenerator[tuple[int, TextDelta, None], None]:
        for seconds, index, delta in steps:
            await asyncio.sleep(seconds)
            yield index, delta, None
        if error is not None:
            raise error

    async def collect() -> list[Step]:
        clock = asyncio.get_running_loop().time
        return [(clock(), index, delta) async for index, delta in paced(deltas())]

    return run_virtually(collect())


def test_the_first_token_goes_at_once_and_slow_ones_too() -> None:
    """What comes less often than chunks may go is not held up at all."""
    steps = [(2 * CHUNK_SECONDS, 0, token(place)) for place in range(5)]
    out = run(steps)
    assert [delta for _, _, delta in out] == [delta for _, _, delta in steps]
    for place, (moment, _, _) in enumerate(out, start=1):
        assert moment == pytest.approx(place * 2 * CHUNK_SECONDS, abs=1e-6)


def test_quick_tokens_share_a_chunk() -> None:
    """A hundred tokens, a hundredth of the interval apart, are two chunks and the first token."""
    steps = [(CHUNK_SECONDS / 10, 0, token(place)) for place in range(100)]
    out = run(steps)
    assert len(out) <= 12
    assert len(out[0][2].token_ids) == 1
    moments = [moment for moment, _, _ in out]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert max(gaps) < CHUNK_SECONDS * 1.2


def test_many_tokens_do_not_wait() -> None:
    """A chunk that is full goes before its time."""
    full = TextDelta(token_ids=tuple(range(CHUNK_TOKENS)))
    out = run([(0.0, 0, token(0)), (0.001, 0, full), (0.001, 0, full), (1.0, 0, token(1))])
    assert out[1][0] < CHUNK_SECONDS / 2
    assert out[2][0] < CHUNK_SECONDS / 2


def test_the_end_does_not_wait() -> None:
    """An answer's last tokens are there when they are known."""
    last = token(1, finish_reason=FinishReason.STOP)
    out = run([(0.0, 0, token(0)), (0.001, 0, last)])
    assert out[-1][0] < CHUNK_SECONDS / 2
    assert out[-1][2].finish_reason is FinishReason.STOP


def test_an_error_comes_after_what_came_before_it() -> None:
    """What was held back is not lost with it."""
    seen = []

    async def collect() -> None:
        async def deltas() -> AsyncGenerator[tuple[int, TextDelta, None], None]:
            for place in range(3):
                yield 0, token(place), None
            raise Unavailable("gone")

        async for _, delta in paced(deltas()):
            seen.extend(delta.token_ids)

    with pytest.raises(Unavailable):
        run_virtually(collect())
    assert seen == [0, 1, 2]


def test_closing_closes_what_is_read() -> None:
    """Left in the middle, the deltas end: their request is aborted."""
    closed = []

    async def deltas() -> AsyncGenerator[tuple[int, TextDelta, None], None]:
        try:
            while True:
                await asyncio.sleep(0.01)
                yield 0, token(0), None
        finally:
            closed.append(True)

    async def leave() -> None:
        pieces = paced(deltas())
        await anext(pieces)
        await pieces.aclose()
        assert closed == [True]

    run_virtually(leave())


@given(
    st.lists(
        st.tuples(st.floats(0, 0.2), st.integers(0, 2), st.integers(0, 1000).map(token)),
        max_size=60,
    )
)
def test_nothing_is_lost_or_out_of_order(steps: list[Step]) -> None:
    """Each answer's tokens come out as they came, and none waits longer than the interval."""
    out = run(steps)
    for index in range(3):
        given_deltas = [delta for _, place, delta in steps if place == index]
        got = [delta for _, place, delta in out if place == index]
        for field in ("text", "token_ids", "logprobs"):
            joined = [part for delta in got for part in getattr(delta, field)]
            assert joined == [part for delta in given_deltas for part in getattr(delta, field)]
        assert sum(delta.num_steps for delta in got) == len(given_deltas)
    moment = 0.0
    arrivals: dict[int, list[float]] = {}
    for seconds, index, _ in steps:
        moment += seconds
        arrivals.setdefault(index, []).append(moment)
    for moment, index, delta in out:
        for _ in delta.token_ids:
            assert moment - arrivals[index].pop(0) <= CHUNK_SECONDS + 1e-4
