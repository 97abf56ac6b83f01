"""A draft model in a process of its own: it makes answers faster, and nothing else."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import (
    NUM_TOKENS,
    PROMPTS,
    Answer,
    Served,
    after_tokens,
    application,
    ask,
    ask_all,
    client,
    kill,
    make_config,
    message,
    processes,
    until,
    worker_drafter,
)

pytestmark = [pytest.mark.ray, pytest.mark.wire]

ACCEPTED = "drafthouse_spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def served(target_folder: Path, expected: list[Answer]) -> Iterator[Served]:
    """The application with the target's own weights as its draft, in a draft worker."""
    del expected  # computed before Ray takes the cores
    config = make_config(target_folder, drafter=worker_drafter(target_folder))
    with application(config) as served:
        yield served


async def accepted_of_one(served: Served, expected: list[Answer]) -> int:
    """Drafts accepted for one request, whose tokens are right."""
    async with client(served) as stub:
        answer, last = await ask(stub, message(PROMPTS[0], max_tokens=NUM_TOKENS))
    assert answer == expected[0]
    return int(last.speculation.accepted)


async def drafting(served: Served, expected: list[Answer]) -> None:
    """Wait until drafts are accepted; the test's time-out is the end of it."""
    while await accepted_of_one(served, expected) == 0:  # noqa: ASYNC110 - nobody tells when
        await asyncio.sleep(0.5)


async def test_drafts_of_another_process_are_accepted(
    served: Served, expected: list[Answer]
) -> None:
    """The shared noise makes the same model draw the same tokens: most drafts are right."""
    answers = await ask_all(served, max_tokens=NUM_TOKENS)
    assert [answer for answer, _ in answers] == expected
    drafted = sum(last.speculation.drafted for _, last in answers)
    accepted = sum(last.speculation.accepted for _, last in answers)
    assert accepted > 0.9 * drafted > 0
    assert served.total(ACCEPTED) == accepted


def test_x61_the_draft_workers_counts_are_on_the_page(served: Served) -> None:
    """Each process is scraped, the draft worker among them."""
    assert served.total("drafthouse_draft_exchanges_total", process="draft") > 0
    assert served.total("drafthouse_members", kind="draft") == 1


async def test_x73_a_draft_workers_death_costs_speed_only(
    served: Served, expected: list[Answer]
) -> None:
    """Killed in the middle of 8 streams: the same tokens, a new worker, and drafts again."""
    [before] = processes("ray::DraftWorker")
    answers = await ask_all(
        served,
        max_tokens=NUM_TOKENS,
        on_tokens=after_tokens(600, lambda: kill("ray::DraftWorker")),
    )
    assert [answer for answer, _ in answers] == expected
    assert not before.is_running()
    await drafting(served, expected)
    [after] = processes("ray::DraftWorker")
    assert after.pid != before.pid
    rising = served.total(ACCEPTED)
    assert await accepted_of_one(served, expected) > 0
    until(lambda: served.total(ACCEPTED) > rising)


async def test_a_stopped_draft_worker_costs_a_deadline_and_no_more(
    served: Served, expected: list[Answer]
) -> None:
    """A worker that hangs is waited for once; the steps after that go on without it."""
    [worker] = processes("ray::DraftWorker")
    worker.suspend()
    try:
        async with asyncio.timeout(30):
            assert await accepted_of_one(served, expected) == 0
    finally:
        worker.resume()
    assert served.total("drafthouse_drafter_unavailable_total", reason="late") > 0
    assert served.total("drafthouse_drafter_unavailable_total", reason="busy") > 0
    await drafting(served, expected)
