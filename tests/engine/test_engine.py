"""The engine's life: taking in, aborting, failing, closing. Its tokens are tested elsewhere."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from cluster.control.policy import FixedPolicy, StepRecord
from cluster.engine.engine import Engine
from cluster.errors import InvalidRequest, Overloaded, TargetUnavailable
from cluster.messages import SequenceTokens, StepInput, StepOutput, TokenDelta
from cluster.request import FinishReason
from tests.fakes import (
    EOS_TOKEN_ID,
    FailingTarget,
    FakeDrafter,
    FakeModel,
    FakeTarget,
    SameDrafter,
    SilentDrafter,
)
from tests.harness import (
    Recorder,
    ask,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    reference,
    running,
    series,
)

MODEL = FakeModel()
LIMITS = make_limits()


def make_plain(target: FakeTarget | None = None, drafter: FakeDrafter | None = None) -> Engine:
    return make_engine(
        target or make_fake_target(LIMITS), drafter or SilentDrafter(MODEL), limits=LIMITS
    )


def assert_empty(engine: Engine) -> None:
    load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, LIMITS.num_blocks)


async def test_generate_yields_deltas_up_to_the_last() -> None:
    """The iterator ends after the delta with the finish reason."""
    request = make_request([1, 2, 3])
    async with running(make_plain()) as engine:
        deltas = [delta async for delta in engine.generate(request)]
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    assert tokens == reference(MODEL, request, max_model_len=256).token_ids
    assert [delta.finish_reason is not None for delta in deltas].index(True) == len(deltas) - 1


async def test_closing_the_iterator_aborts() -> None:
    """A client that goes away stops its sequence."""
    async with running(make_plain()) as engine:
        stream = engine.generate(make_request([1, 2, 3], max_tokens=None, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert_empty(engine)


async def test_an_iterator_that_ended_aborts_nobody() -> None:
    """A finished request's id may be used again at once."""
    async with running(make_plain()) as engine:
        stream = engine.generate(make_request([1], max_tokens=1))
        await anext(stream)
        again = Recorder(make_request([1], max_tokens=3, ignore_eos=True))
        engine.submit(again.request, again)
        await stream.aclose()
        await again.finished.wait()
    assert again.answer().finish_reason is FinishReason.LENGTH


async def test_a_request_id_is_taken_once_at_a_time() -> None:
    """A second request of the same id is refused and the first one goes on."""
    async with running(make_plain()) as engine:
        first = Recorder(make_request([1], max_tokens=5, ignore_eos=True))
        engine.submit(first.request, first)
        with pytest.raises(InvalidRequest, match="request_id"):
            engine.submit(first.request, first)
        await first.finished.wait()
    assert first.answer().num_tokens == 5


async def test_a_refused_request_leaves_nothing() -> None:
    """Validation comes before anything is held."""
    engine = make_plain()
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.submit(make_request([]), lambda _: None)
    assert_empty(engine)


async def test_a_full_queue_refuses_and_what_was_taken_is_served() -> None:
    """x78: places that are free do not count as a queue."""
    limits = make_limits(max_num_seqs=2, max_num_waiting=1)
    engine = make_engine(make_fake_target(limits), SilentDrafter(MODEL), limits=limits)
    recorders = [Recorder(make_request([i], request_id=str(i))) for i in range(1, 4)]
    for recorder in recorders:
        engine.submit(recorder.request, recorder)
    with pytest.raises(Overloaded) as caught:
        engine.submit(make_request([1]), lambda _: None)
    assert (caught.value.waiting, caught.value.limit) == (1, 1)
    async with running(engine):
        await asyncio.gather(*(recorder.finished.wait() for recorder in recorders))


async def test_earlier_output_is_continued_exactly_and_not_emitted_again() -> None:
    """A request that moved here goes on as if it had never moved, from any point."""
    request = make_request([1, 2, 3], max_tokens=9, min_tokens=9)
    whole = reference(MODEL, request, max_model_len=256)
    async with running(make_plain()) as engine:
        for done in range(1, 9):
            moved = make_request(
                [1, 2, 3], max_tokens=9, min_tokens=9, output_token_ids=whole.token_ids[:done]
            )
            [recorder] = await ask(engine, [moved])
            assert recorder.answer().token_ids == whole.token_ids[done:]
            assert recorder.answer().logprobs == whole.logprobs[done:]
            assert recorder.answer().finish_reason is whole.finish_reason


@pytest.mark.parametrize(
    ("output", "reason"),
    [((5, 6), FinishReason.LENGTH), ((5, EOS_TOKEN_ID), FinishReason.STOP)],
)
async def test_earlier_output_that_is_complete_ends_at_once(
    output: tuple[int, ...], reason: FinishReason
) -> None:
    """Nothing is left to do: one empty last delta, and no step."""
    engine = make_plain()
    recorder = Recorder(make_request([1], max_tokens=2, output_token_ids=output))
    engine.submit(recorder.request, recorder)
    assert recorder.deltas == [TokenDelta(request_id="request", finish_reason=reason)]
    assert_empty(engine)


async def test_an_unknown_id_is_not_aborted() -> None:
    """Aborting what is not there is no error: it may just have ended."""
    make_plain().abort("nobody")


async def test_memory_under_a_step_is_free_only_after_it() -> None:
    """An abort while the target writes: the delta at once, the block and the draft state later."""
    seen: list[tuple[bool, int, set[int]]] = []

    def during(step: StepInput) -> None:
        if step.step_id == 3:
            engine.abort("request")
            free = engine.load().free_blocks
            seen.append((recorder.finished.is_set(), free, set(drafter.held)))

    drafter = SameDrafter(MODEL)
    engine = make_plain(make_fake_target(LIMITS, during), drafter)
    recorder = Recorder(make_request([1, 2], max_tokens=None, ignore_eos=True))
    async with running(engine):
        engine.submit(recorder.request, recorder)
        await recorder.finished.wait()
        await asyncio.sleep(0)
    assert seen == [(True, LIMITS.num_blocks - 1, {1})]
    assert_empty(engine)
    assert not drafter.held


async def test_an_aborted_id_may_be_used_again_while_its_step_is_in_flight() -> None:
    """Cancel and retry under the same id: the old step's tokens do not reach the new one."""
    request = make_request([1, 2], max_tokens=6, ignore_eos=True)
    retry = Recorder(request)

    def during(step: StepInput) -> None:
        if step.step_id == 3:
            engine.abort("request")
            engine.submit(request, retry)

    engine = make_plain(make_fake_target(LIMITS, during), SameDrafter(MODEL))
    async with running(engine):
        first = Recorder(make_request([1, 2], max_tokens=None, ignore_eos=True))
        engine.submit(first.request, first)
        await retry.finished.wait()
    assert first.answer().finish_reason is FinishReason.ABORT
    assert retry.answer() == reference(MODEL, request, max_model_len=256)


async def test_a_failing_emit_ends_its_own_request_only() -> None:
    """The neighbours in the same step do not notice."""

    def fail(delta: TokenDelta) -> None:
        raise RuntimeError(delta)

    async with running(make_plain()) as engine:
        engine.submit(make_request([9], request_id="broken"), fail)
        [recorder] = await ask(engine, [make_request([1, 2])])
        assert_empty(engine)
    assert recorder.answer() == reference(MODEL, recorder.request, max_model_len=256)


async def test_emit_may_abort_and_submit() -> None:
    """What a callback does to the engine in the middle of a commit takes effect."""
    other = Recorder(make_request([5], request_id="other", max_tokens=None, ignore_eos=True))
    late = Recorder(make_request([6], request_id="late"))
    engine = make_plain()

    def meddle(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            engine.abort("other")
            engine.submit(late.request, late)

    async with running(engine):
        engine.submit(
            make_request([4], request_id="meddler", max_tokens=3, ignore_eos=True), meddle
        )
        engine.submit(other.request, other)
        await late.finished.wait()
        assert_empty(engine)
    assert other.answer().finish_reason is FinishReason.ABORT
    assert other.answer().num_tokens == 2
    assert late.answer() == reference(MODEL, late.request, max_model_len=256)


@pytest.mark.parametrize(
    "error", [TargetUnavailable("gone"), RuntimeError("a bug"), asyncio.CancelledError()]
)
async def test_a_failing_target_ends_everything_and_says_why(error: BaseException) -> None:
    """Targets fail closed: all requests end with ERROR, `run` raises, nothing more is taken."""
    target = FailingTarget(
        MODEL,
        num_blocks=LIMITS.num_blocks,
        block_size=LIMITS.block_size,
        max_model_len=LIMITS.max_model_len,
        fails_at=3,
        error=error,
    )
    drafter = SameDrafter(MODEL)
    engine = make_plain(target, drafter)
    requests = [
        make_request([i], request_id=str(i), max_tokens=None, ignore_eos=True) for i in range(1, 8)
    ]
    recorders = [Recorder(request) for request in requests]
    for recorder in recorders:
        engine.submit(recorder.request, recorder)
    with pytest.raises(TargetUnavailable, match="the target failed"):
        await engine.run()
    for recorder in recorders:
        assert recorder.deltas[-1].finish_reason is FinishReason.ERROR
        assert recorder.deltas[-1].error is not None
        assert "the target failed" in recorder.deltas[-1].error
    assert_empty(engine)
    assert not drafter.held
    with pytest.raises(TargetUnavailable, match="the target failed"):
        engine.submit(make_request([1]), lambda _: None)


class ConfusedTarget(FakeTarget):
    """Answers what does not follow from the rows."""

    async def step(self, step: StepInput) -> StepOutput:
        """Claims one more accepted draft than there were."""
        output = await super().step(step)
        return StepOutput(
            output.step_id,
            tuple(
                SequenceTokens(
                    seq_id=answer.seq_id,
                    num_accepted=answer.num_accepted + 1,
                    token_ids=(1, *answer.token_ids),
                    logprobs=(0.0, *answer.logprobs),
                )
                for answer in output.sequences
            ),
        )


async def test_an_answer_that_does_not_follow_is_a_failed_target() -> None:
    """A target that accepts drafts nobody made is not believed."""
    target = ConfusedTarget(
        MODEL, num_blocks=4, block_size=LIMITS.block_size, max_model_len=LIMITS.max_model_len
    )
    engine = make_plain(target)
    recorder = Recorder(make_request([1]))
    engine.submit(recorder.request, recorder)
    with pytest.raises(TargetUnavailable, match="does not follow"):
        await engine.run()
    assert recorder.answer().token_ids == ()


async def test_closing_ends_what_is_under_way_and_stops_the_loop() -> None:
    """`close` in the middle: every stream ends, `run` returns, nothing more is taken."""
    engine = make_plain()
    task = asyncio.create_task(engine.run())
    request = make_request([1], max_tokens=None, ignore_eos=True)
    stream = engine.generate(request)
    await anext(stream)
    await engine.close()
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert deltas[-1].error == "the engine is closed"
    await task
    assert_empty(engine)
    with pytest.raises(TargetUnavailable, match="closed"):
        engine.submit(request, lambda _: None)


async def test_a_cancelled_loop_leaves_no_stream_open() -> None:
    """Whoever waits for a delta gets a last one."""
    async with running(make_plain()) as engine:
        recorder = Recorder(make_request([1], max_tokens=None, ignore_eos=True))
        engine.submit(recorder.request, recorder)
        await asyncio.sleep(0)
    assert recorder.answer().finish_reason is FinishReason.ERROR
    assert_empty(engine)


async def test_an_idle_engine_does_nothing_until_a_request_comes() -> None:
    """The loop waits, it does not poll: no turn of the event loop is its own."""
    target = make_fake_target(LIMITS)
    async with running(make_plain(target)) as engine:
        await ask(engine, [make_request([1], max_tokens=2)])
        num_steps = len(target.steps)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(target.steps) == num_steps == engine.load().step_id
        await ask(engine, [make_request([1], max_tokens=2)])


async def test_without_speculation_the_drafter_is_never_called() -> None:
    """K = 0 is plain decoding: one row a step, no call, no extra block."""
    drafter = SameDrafter(MODEL)
    target = make_fake_target(LIMITS)
    engine = make_engine(target, drafter, limits=LIMITS, num_speculative_tokens=0)
    async with running(engine):
        await ask(engine, [make_request([1, 2], max_tokens=10, ignore_eos=True)])
    assert drafter.queries == []
    assert [len(step.sequences[0].token_ids) for step in target.steps] == [2, *[1] * 9]


class Watched(FixedPolicy):
    """Says when it is asked and when it learns."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(0)
        self._seen = seen

    def observe(self, record: StepRecord) -> None:
        """After the step."""
        assert record.target_seconds > 0
        self._seen.append("observe")

    def learn(self) -> None:
        """In the next."""
        self._seen.append("learn")


async def test_the_policy_learns_while_the_target_computes() -> None:
    """No step waits for what the one before it has to teach."""
    seen: list[str] = []
    target = make_fake_target(LIMITS, lambda _: seen.append("step"))
    engine = make_engine(target, SilentDrafter(MODEL), limits=LIMITS, policy=Watched(seen))
    async with running(engine):
        await ask(engine, [make_request([1, 2], max_tokens=3, ignore_eos=True)])
    assert seen == ["learn", "step", "observe"] * 3


async def test_blocks_of_rejected_drafts_go_back(registry: CollectorRegistry) -> None:
    """After a step a sequence holds the blocks of its computed tokens and no more."""
    limits = make_limits(max_model_len=32, block_size=2)
    held: list[tuple[int, int]] = []

    finished = asyncio.Event()

    def emit(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            finished.set()
        else:
            computed = len(engine._scheduler.running[0].token_ids) - 1
            held.append((limits.num_blocks - engine.load().free_blocks, -(-computed // 2)))

    engine = make_engine(
        make_fake_target(limits),
        Wrong(MODEL),
        limits=limits,
        num_speculative_tokens=8,
        registry=registry,
    )
    async with running(engine):
        engine.submit(make_request([1, 2, 3], max_tokens=12, ignore_eos=True), emit)
        await finished.wait()
    assert held
    assert all(blocks == needed for blocks, needed in held)
    assert series(registry)["drafthouse_spec_decode_num_draft_tokens_total"] > 0


class Wrong(FakeDrafter):
    """Always wrong: the target's token plus one."""

    def draft(self, query: object) -> list[int]:
        """As many as wanted."""
        right = SameDrafter(self.model).draft(query)  # type: ignore[arg-type]
        return [(token_id + 1) % self.model.vocab_size for token_id in right]
