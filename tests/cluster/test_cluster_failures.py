"""Four nodes, two engines: whatever dies, stops or leaves, no stream loses or changes a token."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc import aio

from cluster.actors import session
from cluster.config import DrafthouseConfig
from tests.cluster.harness import (
    NUM_TOKENS,
    PATIENCE_SECONDS,
    PROMPTS,
    Answer,
    Served,
    after_tokens,
    ask,
    ask_all,
    client,
    message,
    processes,
    until,
)
from tests.cluster.nodes import Nodes, nodes, spread_config

pytestmark = [pytest.mark.ray, pytest.mark.wire]

RETRY = "grpc-retry-pushback-ms"
ENGINE = "ray::EngineActor"


@pytest.fixture(scope="module")
def config(target_folder: Path) -> DrafthouseConfig:
    """What is deployed."""
    return spread_config(target_folder)


@pytest.fixture(scope="module")
def cluster(config: DrafthouseConfig, expected: list[Answer]) -> Iterator[Nodes]:
    """The nodes, with nothing on them yet."""
    del expected  # computed before Ray takes the cores
    with nodes(config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(cluster: Nodes, config: DrafthouseConfig) -> Served:
    """The application, ready on all nodes."""
    assert cluster.targets
    served = Served(
        config,
        f"{config.gateway.host}:{config.gateway.grpc_port}",
        f"{config.gateway.host}:{config.gateway.http_port}",
    )
    session.await_ready(session.deploy(config), progress=lambda _: None)
    whole(served)
    return served


async def refusals(served: Served) -> list[aio.AioRpcError]:
    """Ask until the first answer; the errors before it."""
    errors = []
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            async with client(served) as stub:
                await ask(stub, message(PROMPTS[0], max_tokens=1))
        except aio.AioRpcError as error:
            errors.append(error)
            await asyncio.sleep(0.1)
        else:
            return errors
    raise TimeoutError


def whole(served: Served, *, num_targets: int = 2) -> None:
    """Wait until everybody is there."""
    until(lambda: served.get("/health")[0] == 200)
    until(lambda: served.total("drafthouse_members", kind="target") == num_targets)
    until(lambda: served.total("drafthouse_members", kind="draft") == 1)


async def same(
    served: Served, expected: list[Answer], on_tokens: Callable[[int], None] = lambda _: None
) -> None:
    """All streams at once equal what one engine alone says, bit for bit."""
    answers = await ask_all(served, max_tokens=NUM_TOKENS, on_tokens=on_tokens)
    assert [answer for answer, _ in answers] == expected


def engines() -> list[psutil.Process]:
    """The engines' processes."""
    return processes(ENGINE)


def retry_seconds(error: aio.AioRpcError) -> float | None:
    """When the caller is to try again, if it was told."""
    told = dict(error.trailing_metadata() or ()).get(RETRY)
    return None if told is None else float(told) / 1000


def log_lines(cluster: Nodes, words: str) -> int:
    """Lines of all logs with these words."""
    logs = Path(cluster.head.get_session_dir_path()) / "logs"
    return sum(path.read_text(errors="replace").count(words) for path in logs.glob("worker-*.err"))


async def test_two_engines_and_a_draft_worker_say_what_one_engine_says(
    served: Served, expected: list[Answer]
) -> None:
    """Spread over nodes: the same tokens, on both engines, with drafts.

    An engine that was slow at first gets little until the other has no place left.
    """

    def emitted() -> list[float]:
        series = served.metrics()["drafthouse_engine_tokens_total"]
        return [count for labels, count in series.items() if ("process", "target") in labels]

    end = time.monotonic() + PATIENCE_SECONDS
    while len(counts := emitted()) < 2 or min(counts) <= 1:
        assert time.monotonic() < end, "an engine is never asked"
        await same(served, expected)


async def test_x78_overload_is_refused_with_a_delay_and_hurts_nobody_else(
    served: Served, expected: list[Answer]
) -> None:
    """More than both engines hold and queue: some are told when to come back, the rest is exact."""
    async with client(served) as stub:

        async def one(seed: int) -> Answer | aio.AioRpcError:
            request = message(PROMPTS[seed], seed=seed, max_tokens=NUM_TOKENS)
            try:
                return (await ask(stub, request))[0]
            except aio.AioRpcError as error:
                return error

        answers = await asyncio.gather(*(one(number % 8) for number in range(64)))
    refused = [answer for answer in answers if isinstance(answer, aio.AioRpcError)]
    kept = [(place % 8, answer) for place, answer in enumerate(answers) if answer not in refused]
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(retry_seconds(error) for error in refused)
    assert len(kept) >= 32
    assert all(answer == expected[place] for place, answer in kept)


async def test_x72_a_killed_engines_streams_go_on_at_the_other(
    served: Served, expected: list[Answer], cluster: Nodes
) -> None:
    """One of two dies in the middle of 8 streams: all are exact, and one line tells of it."""
    victim = engines()[0]
    lines = log_lines(cluster, "the engine is gone")
    await same(served, expected, after_tokens(600, victim.kill))
    assert log_lines(cluster, "the engine is gone") - lines == 1
    whole(served)
    await same(served, expected)


async def test_x73_a_stopped_engines_streams_go_on_at_the_other_and_it_is_replaced(
    served: Served, expected: list[Answer], cluster: Nodes
) -> None:
    """SIGSTOP: silence moves the streams, health replaces the engine, and few lines tell of it."""
    victim = engines()[0]
    lines = log_lines(cluster, "its requests move")
    await same(served, expected, after_tokens(600, victim.suspend))
    assert log_lines(cluster, "its requests move") - lines <= 3
    until(lambda: not victim.is_running())
    whole(served)
    await same(served, expected)


async def test_a_node_that_is_gone_takes_no_stream_with_it(
    served: Served, expected: list[Answer], cluster: Nodes
) -> None:
    """All processes of a target node end at once; the other carries on, and a new one joins."""
    lost = cluster.targets.pop()
    await same(served, expected, after_tokens(600, lambda: cluster.remove(lost)))
    cluster.targets.append(cluster.add_target())
    whole(served)
    await same(served, expected)


async def test_x76_an_update_and_a_scale_down_break_no_stream(
    served: Served, expected: list[Answer]
) -> None:
    """One engine instead of two, all replicas new: streams under way end as they would have."""
    smaller = served.config.model_dump() | {
        "target": served.config.target.model_dump() | {"num_replicas": 1, "max_num_waiting": 32}
    }
    before = {process.pid for process in engines()}
    config = served.config.model_validate(smaller)
    await same(served, expected, after_tokens(200, lambda: session.deploy(config)))
    until(lambda: len(engines()) == 1 and engines()[0].pid not in before)
    await refusals(served)
    whole(served, num_targets=1)
    await same(served, expected)


async def test_x77_until_the_first_token_the_caller_is_told_to_come_back(
    served: Served, expected: list[Answer]
) -> None:
    """No target: unavailable and nothing else, with a hint when; served once one is there."""
    assert served.get("/health") == (200, "SERVING\n")
    [last] = engines()
    last.kill()
    until(lambda: served.get("/health") == (503, "NOT_SERVING\n"))
    errors = await refusals(served)
    assert errors
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert all(retry_seconds(error) for error in errors)
    assert served.get("/health") == (200, "SERVING\n")
    await same(served, expected)


async def test_x75_without_the_head_node_streams_go_on(
    served: Served, expected: list[Answer], cluster: Nodes
) -> None:
    """The head's control service and its node manager die: gateway and engine need neither."""
    await same(served, expected, after_tokens(600, cluster.end_head))
    await same(served, expected)
