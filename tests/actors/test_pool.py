"""Remote engines behind one `generate`: requests survive the engines they run on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.actors import engine as engine_module
from cluster.actors import link as link_module
from cluster.actors.engine import EngineHost
from cluster.actors.pool import MAX_MOVES, EnginePool
from cluster.errors import InvalidRequest, Overloaded, TargetUnavailable
from cluster.messages import ModelInfo, TokenDelta
from cluster.request import FinishReason, Request, SamplingParams
from tests.actors.fake_ray import FakeHandle
from tests.fakes import FailingTarget, FakeModel, SiblingDrafter
from tests.harness import (
    Answer,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    reference,
)

INFO = ModelInfo(name="fake", max_model_len=256, vocab_size=32, drafters=("sibling",))
SEEDED = SamplingParams(seed=11)


class Host(EngineHost):
    """An engine host that can describe itself, as the actor can."""

    async def info(self) -> ModelInfo:
        """What is served."""
        return INFO


Start = Callable[..., FakeHandle]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts engines with a fake target; all are ended after the test."""
    monkeypatch.setattr(link_module.ray, "cancel", lambda _: None)
    handles: list[FakeHandle] = []

    def start_engine(*, fails_at: int | None = None, **sizes: float) -> FakeHandle:
        limits = make_limits(**sizes)
        target = make_fake_target(limits)
        if fails_at is not None:
            target = FailingTarget(
                FakeModel(),
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                max_model_len=limits.max_model_len,
                fails_at=fails_at,
            )
        engine = make_engine(target, SiblingDrafter(FakeModel()), limits=limits)
        handles.append(FakeHandle(Host(engine, engine_id=f"engine-{len(handles)}")))
        return handles[-1]

    yield start_engine
    for handle in handles:
        handle.kill()
        for task in (handle.instance._running, handle.instance._collecting):
            task.cancel()
            await asyncio.wait([task])


async def pool_of(*handles: FakeHandle, patience_seconds: float = 5.0) -> EnginePool:
    """A pool whose engines have all been heard of."""
    pool = EnginePool("gateway", INFO, patience_seconds=patience_seconds)
    pool.set_engines({f"engine-{place}": handle for place, handle in enumerate(handles)})
    await until(lambda: all(link.accepts for link in pool._links.values()))
    return pool


async def collect(pool: EnginePool, request: Request) -> Answer:
    """The request's whole answer."""
    deltas = [delta async for delta in pool.generate(request)]
    assert {delta.request_id for delta in deltas} == {request.request_id}
    return Answer(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        num_prompt_tokens=len(request.prompt_token_ids),
    )


def long_request(request_id: str = "request", seed: int = 11) -> Request:
    """200 tokens, EOS or not."""
    return make_request(
        [3, 1, 4],
        request_id=request_id,
        max_tokens=200,
        ignore_eos=True,
        sampling=SamplingParams(seed=seed),
    )


def expected(request: Request) -> Answer:
    """What the model alone says."""
    return reference(FakeModel(), request, max_model_len=256)


def idle(handle: FakeHandle) -> bool:
    """Whether the engine holds nothing."""
    load = handle.instance._engine.load()
    return (load.running, load.waiting) == (0, 0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, with the test's own time-out as the end."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


async def test_a_stream_is_the_engines_own(start: Start) -> None:
    """Between gateway and engine nothing is lost, doubled or reordered, for 8 requests at once."""
    pool = await pool_of(start())
    requests = [long_request(f"r{i}", seed=i) for i in range(8)]
    answers = await asyncio.gather(*(collect(pool, request) for request in requests))
    assert answers == [expected(request) for request in requests]


@pytest.mark.parametrize("after", [0, 1, 7, 60, 150])
async def test_x72_an_engine_dies_and_its_streams_go_on_exactly(start: Start, after: int) -> None:
    """Killed after any number of tokens: the same tokens and logprobs, from another engine."""
    handles = start(), start()
    pool = await pool_of(*handles)
    requests = [long_request(f"r{i}", seed=i) for i in range(4)]
    num_tokens = 0

    async def watched(request: Request) -> Answer:
        nonlocal num_tokens
        deltas: list[TokenDelta] = []
        async for delta in pool.generate(request):
            deltas.append(delta)
            num_tokens += len(delta.token_ids)
            if num_tokens >= after:
                handles[0].kill()
        return Answer(
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
            finish_reason=deltas[-1].finish_reason,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    answers = await asyncio.gather(*map(watched, requests))
    assert handles[0].dead.is_set()
    assert answers == [expected(request) for request in requests]


async def test_x72_the_prompts_scores_are_told_once(start: Start) -> None:
    """A request that moves does not ask again for what has come; the tokens' own scores go on."""
    handles = start(), start()
    pool = await pool_of(*handles)
    request = replace(long_request(), prompt_logprobs=True, top_logprobs=1)
    deltas: list[TokenDelta] = []
    async for delta in pool.generate(request):
        deltas.append(delta)
        if len(deltas) == 5:
            for handle in handles:
                if not idle(handle):
                    handle.kill()
    assert any(handle.dead.is_set() for handle in handles)
    assert [len(delta.prompt_logprobs) for delta in deltas] == [2] + [0] * (len(deltas) - 1)
    answer = expected(request)
    top = [pairs for delta in deltas for pairs in delta.top_logprobs]
    assert top == [(pair,) for pair in zip(answer.token_ids, answer.logprobs, strict=True)]


async def test_x72_a_lone_engines_requests_wait_for_its_replacement(start: Start) -> None:
    """With no other engine the stream pauses, and goes on exactly when there is one again."""
    first = start()
    pool = await pool_of(first)
    request = long_request()
    answer = asyncio.create_task(collect(pool, request))
    await until(lambda: not idle(first))
    first.kill()
    await asyncio.sleep(0.05)
    assert not answer.done()
    pool.set_engines({"engine-9": start()})
    assert await answer == expected(request)


async def test_a_failed_target_moves_its_requests_and_not_its_error(start: Start) -> None:
    """An engine whose target raises ends its sequences; the client gets the rest elsewhere."""
    failing = start(fails_at=10)
    pool = await pool_of(failing)
    request = long_request()
    answer = asyncio.create_task(collect(pool, request))
    await until(failing.instance._running.done)
    pool.set_engines({"engine-0": failing, "engine-1": start()})
    assert await answer == expected(request)


async def test_patience_has_an_end(start: Start) -> None:
    """When no engine comes the request fails as unavailable, and does not hang."""
    first = start()
    pool = await pool_of(first, patience_seconds=0.05)
    answer = asyncio.create_task(collect(pool, long_request()))
    await until(lambda: not idle(first))
    first.kill()
    with pytest.raises(TargetUnavailable, match="none came"):
        await answer


async def test_new_requests_are_refused_at_once_without_an_engine(start: Start) -> None:
    """Only requests that have begun wait for a replacement."""
    pool = EnginePool("gateway", INFO)
    assert not pool.ready()
    with pytest.raises(TargetUnavailable):
        await collect(pool, long_request())
    pool = await pool_of(start())
    assert pool.ready()


async def test_a_request_that_kills_engines_is_stopped(start: Start) -> None:
    """A request may move only so often: it must not take down engine after engine."""
    pool = await pool_of(*(start(fails_at=1) for _ in range(MAX_MOVES + 3)))
    with pytest.raises(TargetUnavailable):
        await collect(pool, long_request())
    assert sum(link.accepts for link in pool._links.values()) >= 1


async def test_x70_closing_the_stream_frees_the_sequence(start: Start) -> None:
    """A caller that goes away takes its sequence with it."""
    handle = start()
    pool = await pool_of(handle)
    async with aclosing(pool.generate(long_request())) as deltas:
        await anext(deltas)
        assert not idle(handle)
    await until(lambda: idle(handle))


async def test_two_requests_may_have_one_id(start: Start) -> None:
    """Clients choose their ids without asking each other."""
    pool = await pool_of(start())
    answers = await asyncio.gather(*(collect(pool, long_request("same")) for _ in range(2)))
    assert answers == [expected(long_request())] * 2


async def test_the_engines_refusals_reach_the_caller_as_they_are(start: Start) -> None:
    """What the engine raises on purpose is raised here, not an error about a remote call."""
    handle = start(max_num_waiting=1, max_num_seqs=1)
    pool = await pool_of(handle)
    with pytest.raises(InvalidRequest) as refused:
        await collect(pool, make_request([999]))
    assert type(refused.value).__name__ in {"InvalidRequest", "ContextExceeded"}
    others = [asyncio.create_task(collect(pool, long_request(f"r{i}"))) for i in range(3)]
    done, _ = await asyncio.wait(others)
    assert any(isinstance(task.exception(), Overloaded) for task in done)
    assert pool.ready()


async def test_the_least_loaded_engine_is_picked(start: Start) -> None:
    """Requests that come together are spread, before any engine has told of its load."""
    handles = start(), start()
    pool = await pool_of(*handles)
    answers = [asyncio.create_task(collect(pool, long_request(f"r{i}"))) for i in range(4)]
    await until(lambda: not any(map(idle, handles)))
    loads = [handle.instance._engine.load() for handle in handles]
    assert [load.running + load.waiting for load in loads] == [2, 2]
    await asyncio.gather(*answers)


async def test_an_engine_that_left_finishes_what_it_has(start: Start) -> None:
    """Draining: no new requests, none broken, and the link ends with the last of them."""
    leaving, staying = start(), start()
    pool = await pool_of(leaving)
    request = long_request()
    answer = asyncio.create_task(collect(pool, request))
    await until(lambda: not idle(leaving))
    [link] = pool._links.values()
    pool.set_engines({"engine-1": staying})
    assert not link.accepts
    assert await answer == expected(request)
    assert idle(staying)
    await until(lambda: link.closed)


async def test_a_broken_stream_to_a_living_engine_is_made_anew(start: Start) -> None:
    """A link that broke alone is replaced under a new name; the request goes on exactly."""
    handle = start()
    pool = await pool_of(handle)
    request = long_request()
    answer = asyncio.create_task(collect(pool, request))
    await until(lambda: not idle(handle))
    [link] = pool._links.values()
    link.close()
    await until(lambda: link.closed)
    pool.set_engines({"engine-0": handle})
    assert await answer == expected(request)
    await until(lambda: idle(handle))


async def test_a_gateway_that_is_gone_holds_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a stream that nobody reads are ended after a grace."""
    monkeypatch.setattr(engine_module, "GONE_SECONDS", 0.02)
    handle = start()
    await handle.submit.remote("gone", long_request())
    await until(lambda: idle(handle) and not handle.instance._outboxes)


async def test_a_probe_of_an_idle_engine_is_a_real_token(start: Start) -> None:
    """Health is not that somebody answers, but that a token comes out."""
    handle = start()
    before = handle.instance._engine.load().step_id
    await handle.probe.remote(timeout_seconds=5.0)
    assert handle.instance._engine.load().step_id > before


async def test_x73_a_probe_of_a_stalled_engine_fails(start: Start) -> None:
    """A target that never answers is found out, idle or busy."""
    stalled = start()

    async def never(step: object) -> None:
        del step
        await asyncio.Event().wait()

    stalled.instance._engine._target.step = never
    for _ in range(2):
        with pytest.raises(TargetUnavailable, match="no progress"):
            await stalled.instance.probe(timeout_seconds=0.02)


async def test_a_failed_engine_says_so_to_its_supervisor(start: Start) -> None:
    """`run` pends while the engine runs, and raises when it failed."""
    handle = start(fails_at=1)
    run = handle.run.remote()
    with pytest.raises(TargetUnavailable):
        await handle.probe.remote(timeout_seconds=5.0)
    with pytest.raises(TargetUnavailable):
        await run


def test_the_last_delta_is_never_the_engines_end() -> None:
    """FinishReason.ERROR is what the pool turns into a move; clients see it only in the end.

    FinishReason.FAILED is of the request alone, and would be the same anywhere.
    """
    failed = TokenDelta(request_id="r", finish_reason=FinishReason.FAILED, error="boom")
    assert link_module._delta(failed) is failed
    with pytest.raises(TargetUnavailable, match="boom"):
        link_module._delta(
            TokenDelta(request_id="r", finish_reason=FinishReason.ERROR, error="boom")
        )
