"""Targets that come and go with the load: real Serve, our policy in its controller."""

import asyncio
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.cluster.harness import (
    NUM_TOKENS,
    PROMPTS,
    Answer,
    Served,
    application,
    ask,
    client,
    make_config,
    message,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.wire,
    # Serve tells to set environment variables instead, and reads none of them.
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
]

POLL_SECONDS = 0.3
EDGE_SECONDS = 300.0


@pytest.fixture(scope="module")
def served(target_folder: Path, expected: list[Answer]) -> Iterator[Served]:
    """One target of two places, which may become two targets."""
    del expected  # computed before Ray takes the cores
    config = make_config(
        target_folder,
        target={
            "model": str(target_folder),
            "max_model_len": 1024,
            "num_threads": 1,
            "max_num_seqs": 2,
            "resources": {"CPU": 0.4},
        },
        autoscaling={
            "target": {
                "max_replicas": 2,
                "target_delay_seconds": 0.2,
                "upscale_delay_seconds": 2.0,
                "downscale_delay_seconds": 4.0,
            }
        },
    )
    with application(config) as served:
        yield served


class Load:
    """Clients that ask the same questions again and again, and look at every answer."""

    def __init__(self, served: Served, expected: list[Answer]) -> None:
        self._served = served
        self._expected = expected
        self._enough = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self.num_answers = 0

    def begin(self, number: int) -> None:
        """So many clients from now on."""
        self._clients = [asyncio.create_task(self._ask(index)) for index in range(number)]

    async def end(self) -> None:
        """Let every answer under way come to its end. Raises what a client met."""
        self._enough.set()
        await asyncio.gather(*self._clients)
        self._enough.clear()

    async def _ask(self, index: int) -> None:
        async with client(self._served) as stub:
            while not self._enough.is_set():
                request = message(PROMPTS[index], seed=index, max_tokens=NUM_TOKENS)
                answer, _ = await ask(stub, request)
                assert answer == self._expected[index]
                self.num_answers += 1


async def sizes_until(served: Served, number: int) -> list[int]:
    """How many targets take requests, at every look until there are `number`."""
    sizes: list[int] = []
    async with asyncio.timeout(EDGE_SECONDS):
        while not sizes or sizes[-1] != number:
            await asyncio.sleep(POLL_SECONDS)
            total = await asyncio.to_thread(served.total, "drafthouse_members", kind="target")
            sizes.append(int(total))
    return sizes


async def test_x74_x76_targets_follow_a_square_wave_and_no_stream_breaks(
    served: Served, expected: list[Answer]
) -> None:
    """Up by one when eight clients queue, down by one when one is left, and every answer exact.

    Through all of it streams are open: those of the target that leaves among them.
    """
    load = Load(served, expected)
    load.begin(8)
    rising = await sizes_until(served, 2)
    await asyncio.sleep(2.0)
    await load.end()
    load.begin(1)
    falling = await sizes_until(served, 1)
    await load.end()
    changes = [size for size, _ in groupby(rising + falling)]
    assert changes == [1, 2, 1]
    assert load.num_answers > 8
