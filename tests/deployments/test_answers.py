"""Several answers of one call: mixed as they come, none lost, all closed together."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.answers import interleaved

# For each stream the turns of the event loop that it lets pass before each of its items.
PAUSES = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5)


class Streams:
    """Streams that note how they end."""

    def __init__(self, pauses: list[list[int]], *, fails: int | None = None) -> None:
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        self.all = [
            self._stream(place, turns, fails=place == fails) for place, turns in enumerate(pauses)
        ]

    async def _stream(
        self, place: int, turns: list[int], *, fails: bool
    ) -> AsyncGenerator[int, None]:
        self.begun.add(place)
        try:
            for item, count in enumerate(turns):
                for _ in range(count):
                    await asyncio.sleep(0)
                yield item
            if fails:
                raise LookupError(place)
        finally:
            self.ended.add(place)


@given(PAUSES)
def test_every_item_comes_once_and_in_its_streams_order(pauses: list[list[int]]) -> None:
    """Whatever the pace of each stream."""
    streams = Streams(pauses)

    async def run() -> list[tuple[int, int]]:
        return [placed async for placed in interleaved(streams.all)]

    got = asyncio.run(run())
    for place, turns in enumerate(pauses):
        assert [item for other, item in got if other == place] == list(range(len(turns)))
    assert streams.ended == set(range(len(pauses)))


@given(PAUSES, st.integers(0, 12))
def test_closed_at_any_item_all_streams_are_closed(pauses: list[list[int]], count: int) -> None:
    """What has begun has ended when the closing returns."""
    streams = Streams(pauses)

    async def run() -> None:
        mixed = interleaved(streams.all)
        for _ in range(count):
            if await anext(mixed, None) is None:
                break
        await mixed.aclose()
        assert streams.begun == streams.ended

    asyncio.run(run())


@given(PAUSES, st.data())
def test_one_failure_ends_all(pauses: list[list[int]], data: st.DataObject) -> None:
    """The first error is raised as it is, after what came before it, and nothing goes on."""
    fails = data.draw(st.integers(0, len(pauses) - 1))
    streams = Streams(pauses, fails=fails)

    got: list[tuple[int, int]] = []

    async def run() -> None:
        async for placed in interleaved(streams.all):
            got.append(placed)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(LookupError, match=str(fails)):
        asyncio.run(run())
    assert sum(place == fails for place, _ in got) == len(pauses[fails])
    assert streams.begun == streams.ended


async def test_cancelled_while_it_waits() -> None:
    """A cancel in the middle of nothing closes streams that would wait for ever."""
    closed = []

    async def silent(place: int) -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            closed.append(place)

    async def read() -> None:
        async for _ in interleaved([silent(0), silent(1)]):
            pass

    reading = asyncio.create_task(read())
    for _ in range(5):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert sorted(closed) == [0, 1]
