"""What an engine tells of a prompt: cached tokens, logprobs; and requests that fail alone."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from cluster.engine.limits import EngineLimits
from cluster.errors import TargetUnavailable
from cluster.messages import SequenceTokens, StepInput, StepOutput
from cluster.request import FinishReason, Request
from tests.fakes import FakeModel, FakeTarget, SameDrafter, SilentDrafter
from tests.harness import (
    Recorder,
    ask,
    check_same,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    running,
    series,
)

MODEL = FakeModel()
LIMITS = make_limits()
PROMPT = [(7 * i + i * i) % 32 for i in range(100)]


def scored(prompt: Iterable[int], **changes: object) -> Request:
    request = make_request(prompt, max_tokens=6, ignore_eos=True)
    return replace(request, prompt_logprobs=True, **changes)  # type: ignore[arg-type]


def scores(prompt: tuple[int, ...]) -> tuple[float, ...]:
    """What the model says of each token of the prompt but the first."""
    return tuple(
        MODEL.logprob(MODEL.state(prompt[:length]), prompt[length])
        for length in range(1, len(prompt))
    )


class Watched(FakeTarget):
    """Keeps which positions were scored, one entry a time."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(
            FakeModel(limits.vocab_size),
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
        )
        self.scored: list[tuple[int, int]] = []

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget."""
        for rows in step.sequences:
            positions = range(rows.start + 1, rows.start + 1 + len(rows.scored_token_ids))
            self.scored += [(rows.seq_id, position) for position in positions]
        return await super().step(step)


@pytest.mark.parametrize("budget", [1, 7, 64, 256])
async def test_prompt_logprobs_come_whole_with_the_first_token(budget: int) -> None:
    """However the prompt is cut, every token but the first has its logprob, each asked for once."""
    limits = make_limits(max_num_batched_tokens=budget)
    target = Watched(limits)
    async with running(make_engine(target, SameDrafter(MODEL), limits=limits)) as engine:
        [recorder] = await ask(engine, [scored(PROMPT)])
    assert recorder.deltas[0].prompt_logprobs == scores(tuple(PROMPT))
    assert target.scored == [(1, position) for position in range(1, 100)]
    check_same([recorder], limits)


async def test_prompt_logprobs_are_computed_whatever_is_cached() -> None:
    """A hit would skip the rows that tell; the next request without them hits all the same."""
    async with running(
        make_engine(make_fake_target(LIMITS), SilentDrafter(MODEL), limits=LIMITS)
    ) as engine:
        for request, num_cached in (
            (make_request(PROMPT), 0),
            (scored(PROMPT), 0),
            (make_request(PROMPT), 99),
        ):
            [recorder] = await ask(engine, [request])
            assert recorder.num_cached == num_cached
            expected = scores(tuple(PROMPT)) if request.prompt_logprobs else ()
            assert recorder.prompt_logprobs == expected


async def test_after_preemption_nothing_is_scored_or_delivered_twice() -> None:
    """Put back in the middle of its prompt and once more while decoding: each logprob once."""
    limits = make_limits(max_num_seqs=1, max_num_batched_tokens=30, num_blocks=3)
    target = Watched(limits)
    engine = make_engine(target, SilentDrafter(MODEL), limits=limits)
    low = Recorder(scored(PROMPT))
    high = [
        Recorder(make_request([i], request_id=str(i), max_tokens=2, ignore_eos=True))
        for i in range(2)
    ]

    def submit(number: int) -> None:
        engine.submit(replace(high[number].request, priority=1), high[number])

    engine.submit(low.request, low)
    target._during_step = lambda step: {2: lambda: submit(0), 8: lambda: submit(1)}.get(
        step.step_id, lambda: None
    )()
    async with running(engine):
        for recorder in (low, *high):
            await recorder.finished.wait()
    preempted = [len(step.sequences) == 1 and step.sequences[0].seq_id > 1 for step in target.steps]
    assert sum(preempted) == 4, "two steps each"
    assert target.scored == [(1, position) for position in range(1, 100)]
    assert low.prompt_logprobs == scores(tuple(PROMPT))
    check_same([low, *high], limits)


async def test_a_moved_request_has_had_its_prompt_logprobs() -> None:
    """With earlier output the first engine has delivered them: not scored, not sent again."""
    target = Watched(LIMITS)
    async with running(make_engine(target, SilentDrafter(MODEL), limits=LIMITS)) as engine:
        [whole] = await ask(engine, [scored(PROMPT)])
        output = whole.answer().token_ids[:2]
        num_scored = len(target.scored)
        [moved] = await ask(engine, [scored(PROMPT, output_token_ids=output)])
    assert moved.prompt_logprobs == ()
    assert moved.answer().token_ids == whole.answer().token_ids[2:]
    assert len(target.scored) == num_scored
    assert moved.num_cached == 100, "of the prompt; the output is none"


async def test_cached_tokens_come_with_the_first_token_and_are_counted() -> None:
    """Per request in its first delta; over all in two counters that exist at zero."""
    registry = CollectorRegistry()
    engine = make_engine(
        make_fake_target(LIMITS), SilentDrafter(MODEL), limits=LIMITS, registry=registry
    )
    names = [
        "drafthouse_prefix_cache_hit_tokens_total",
        "drafthouse_prefix_cache_queried_tokens_total",
        "drafthouse_preemptions_total",
        "drafthouse_queue_seconds_count",
    ]
    assert [series(registry)[name] for name in names] == [0, 0, 0, 0]
    async with running(engine):
        [first] = await ask(engine, [make_request(PROMPT)])
        [second] = await ask(engine, [make_request(PROMPT)])
    assert [first.deltas[0].num_cached_tokens, second.deltas[0].num_cached_tokens] == [0, 99]
    assert [series(registry)[name] for name in names] == [99, 200, 0, 2]


class Refusing(FakeTarget):
    """Cannot go on with the sequence of a certain id from its third step on."""

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget, but for that."""
        output = await super().step(step)
        if step.step_id <= 2:  # the others' first steps
            return output
        return StepOutput(
            output.step_id,
            tuple(
                SequenceTokens(seq_id=2, num_accepted=0, token_ids=(), error="no token is left")
                if answer.seq_id == 2
                else answer
                for answer in output.sequences
            ),
        )


async def test_a_request_that_cannot_go_on_ends_alone() -> None:
    """It has FAILED and the target's words; its neighbours notice nothing, its memory is back."""
    target = Refusing(MODEL, num_blocks=4, block_size=256, max_model_len=256)
    asked = [make_request([i, 5], request_id=str(i), ignore_eos=True) for i in (1, 2, 3)]
    async with running(make_engine(target, SameDrafter(MODEL), limits=LIMITS)) as engine:
        recorders = await ask(engine, asked)
        load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, 4)
    failed = recorders.pop(1)
    assert failed.deltas[-1].finish_reason is FinishReason.FAILED
    assert failed.deltas[-1].error == "no token is left"
    assert failed.answer().num_tokens > 0
    check_same(recorders, LIMITS)


class Unscored(FakeTarget):
    """Forgets the scores."""

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget, without them."""
        output = await super().step(step)
        return StepOutput(
            output.step_id,
            tuple(replace(answer, scores=()) for answer in output.sequences),
        )


async def test_an_answer_without_the_scores_is_a_failed_target() -> None:
    """What was asked for is there, or nothing of the answer is believed."""
    target = Unscored(MODEL, num_blocks=4, block_size=256, max_model_len=256)
    engine = make_engine(target, SilentDrafter(MODEL), limits=LIMITS)
    recorder = Recorder(scored(PROMPT))
    engine.submit(recorder.request, recorder)
    with pytest.raises(TargetUnavailable, match="does not follow"):
        await engine.run()


async def test_top_logprobs_end_where_the_answer_ends() -> None:
    """A stop inside an accepted run cuts them like everything else."""
    async with running(
        make_engine(make_fake_target(LIMITS), SameDrafter(MODEL), limits=LIMITS)
    ) as engine:
        plain = make_request([3, 4], ignore_eos=True)
        [whole] = await ask(engine, [plain])
        stop = whole.answer().token_ids[3]
        request = replace(
            make_request([3, 4], ignore_eos=True, stop_token_ids=(stop,)), top_logprobs=1
        )
        [recorder] = await ask(engine, [request])
    answer = recorder.answer()
    assert answer.token_ids == whole.answer().token_ids[:4]
    assert recorder.deltas[-1].num_drafted > recorder.deltas[-1].num_accepted
    best = [top for delta in recorder.deltas for [top] in delta.top_logprobs]
    assert best == list(zip(answer.token_ids, answer.logprobs, strict=True))
