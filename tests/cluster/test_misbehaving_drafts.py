"""A real draft worker that is stopped and let go again in the middle of eight streams."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import (
    NUM_TOKENS,
    Answer,
    Served,
    after_tokens,
    application,
    ask_all,
    make_config,
    processes,
    until,
    worker_drafter,
)

pytestmark = [pytest.mark.ray, pytest.mark.wire]

ACCEPTED = "drafthouse_spec_decode_num_accepted_tokens_total"
UNAVAILABLE = "drafthouse_drafter_unavailable_total"


@pytest.fixture(scope="module")
def served(target_folder: Path, expected: list[Answer]) -> Iterator[Served]:
    """The application with the target's own weights as its draft, which runs ahead."""
    del expected  # computed before Ray takes the cores
    drafter = worker_drafter(target_folder) | {"run_ahead": True}
    with application(make_config(target_folder, drafter=drafter)) as served:
        yield served


async def test_x73_a_stopped_worker_changes_no_token_and_stops_no_stream(
    served: Served, expected: list[Answer]
) -> None:
    """Stopped in the middle of 8 streams: the same tokens, and one deadline lost at most.

    Let go, it answers late, is asked again without being waited for, and then drafts as before.
    """
    await ask_all(served, max_tokens=NUM_TOKENS)  # until the worker is known to the engine
    [worker] = processes("ray::DraftWorker")
    try:
        async with asyncio.timeout(60):
            answers = await ask_all(
                served, max_tokens=NUM_TOKENS, on_tokens=after_tokens(400, worker.suspend)
            )
            assert [answer for answer, _ in answers] == expected
            late = served.total(UNAVAILABLE, reason="late")
            answers = await ask_all(served, max_tokens=NUM_TOKENS)
    finally:
        worker.resume()
    assert [answer for answer, _ in answers] == expected
    assert sum(last.speculation.accepted for _, last in answers) == 0
    assert served.total(UNAVAILABLE, reason="late") == late > 0
    assert served.total(UNAVAILABLE, reason="busy") > 0
    before = served.total(ACCEPTED)

    def drafts_again() -> bool:
        asyncio.run(ask_all(served, max_tokens=NUM_TOKENS))
        return served.total(ACCEPTED) > before

    await asyncio.to_thread(until, drafts_again)
    assert [answer for answer, _ in await ask_all(served, max_tokens=NUM_TOKENS)] == expected
    assert worker.is_running()
