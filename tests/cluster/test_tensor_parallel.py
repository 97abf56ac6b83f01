"""A target of two ranks in the whole application: the same tokens, whatever happens to a rank."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.harness import (
    PROMPTS,
    Answer,
    Served,
    after_tokens,
    application,
    ask,
    ask_all,
    client,
    make_config,
    message,
    processes,
)

pytestmark = [pytest.mark.ray, pytest.mark.wire]

NUM_TOKENS = 100  # of every answer
RANK = "ray::RankActor"


@pytest.fixture(scope="module")
def served(target_folder: Path, expected: list[Answer]) -> Iterator[Served]:
    """The application with n-gram drafts and a target in two processes."""
    del expected  # computed before Ray takes the cores
    config = make_config(
        target_folder,
        target={
            "model": str(target_folder),
            "max_model_len": 1024,
            "tensor_parallel_size": 2,
            "rank_timeout_seconds": 3.0,
            "resources": {"CPU": 0.4},
            "engine_resources": {"CPU": 0.3},
        },
    )
    with application(config) as served:
        yield served


@pytest.fixture(scope="module")
def answers(served: Served) -> list[Answer]:
    """What the two ranks say to PROMPTS at once, with drafts."""
    return [answer for answer, _ in asyncio.run(ask_all(served, max_tokens=NUM_TOKENS))]


def ranks() -> list[psutil.Process]:
    """Both processes."""
    return processes(RANK)


def test_two_ranks_draw_what_one_draws(answers: list[Answer], expected: list[Answer]) -> None:
    """Equal tokens, and logprobs equal up to the rounding of sums in another order."""
    assert len(ranks()) == 2
    for mine, theirs in zip(answers, expected, strict=True):
        assert mine.token_ids == theirs.token_ids[:NUM_TOKENS]
        assert mine.logprobs == pytest.approx(theirs.logprobs[:NUM_TOKENS], abs=1e-4)


async def test_x13_one_request_at_its_limit_and_nothing_else(
    served: Served, answers: list[Answer]
) -> None:
    """It ends, alone and without drafts to the same bits, and so does the next one."""
    async with asyncio.timeout(60), client(served) as stub:
        for _ in range(2):
            request = message(PROMPTS[0], max_tokens=NUM_TOKENS, speculate=False)
            answer, _ = await ask(stub, request)
            assert answer == answers[0]
            await asyncio.sleep(0.5)


def end(process: psutil.Process) -> None:
    """As the kernel would."""
    process.kill()


def stop(process: psutil.Process) -> None:
    """So that it is there and does nothing."""
    process.suspend()


@pytest.mark.parametrize(("harm", "number"), [(end, 1), (stop, 0)])
async def test_a_rank_that_is_lost_is_a_pause(
    served: Served, answers: list[Answer], harm: Callable[[psutil.Process], Any], number: int
) -> None:
    """Killed or hung in the middle of 8 streams: each goes on exactly, and no rank is left over."""
    before = ranks()
    again = await ask_all(
        served,
        max_tokens=NUM_TOKENS,
        on_tokens=after_tokens(200, lambda: harm(before[number])),
    )
    assert [answer for answer, _ in again] == answers
    assert not any(process.is_running() for process in before)
    assert len(ranks()) == 2
