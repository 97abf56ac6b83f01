"""Whatever comes, in whatever order: the tokens are the model's own, and nothing is left behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.limits import EngineLimits
from cluster.messages import StepInput
from cluster.request import FinishReason, Request, SamplingParams, SpeculationParams
from tests.fakes import (
    DyingDrafter,
    FakeDrafter,
    FakeModel,
    LyingDrafter,
    RandomDrafter,
    SameDrafter,
    SiblingDrafter,
    SilentDrafter,
)
from tests.harness import (
    Recorder,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    reference,
    running,
)

MODEL = FakeModel()
MAX_MODEL_LEN = 48
COMMON = [7 * i % 32 for i in range(40)]  # what prompts begin with, more or less of it
DRAFTERS: list[type[FakeDrafter]] = [
    SameDrafter,
    SiblingDrafter,
    RandomDrafter,
    SilentDrafter,
    LyingDrafter,
    DyingDrafter,
]


@dataclass(frozen=True)
class Arrival:
    """A request, the step in which it comes, and the one in which it is aborted, if it is."""

    request: Request
    step: int
    abort_step: int | None


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any request that fits."""
    max_tokens = draw(st.none() | st.integers(1, 30))
    shared = COMMON[: draw(st.integers(0, len(COMMON)))]
    prompt = [*shared, *draw(st.lists(st.integers(0, 31), min_size=1, max_size=17))]
    prompt = prompt[: MAX_MODEL_LEN - 1]
    room = MAX_MODEL_LEN - len(prompt)
    request = make_request(
        prompt,
        sampling=SamplingParams(
            seed=draw(st.integers(0, 3)), temperature=draw(st.sampled_from([0.0, 1.0]))
        ),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 30, room))),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 31), max_size=2))),
        ignore_eos=draw(st.booleans()),
        speculation=SpeculationParams(
            enabled=draw(st.booleans()), max_tokens=draw(st.none() | st.integers(0, 4))
        ),
    )
    return replace(
        request,
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from(["", "", "other"])),
        prompt_logprobs=draw(st.booleans()),
        top_logprobs=draw(st.integers(0, 1)),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Some requests over the first steps, some of them aborted."""
    return [
        Arrival(request, draw(st.integers(0, 12)), draw(st.none() | st.integers(0, 20)))
        for request in draw(st.lists(requests(), min_size=1, max_size=6))
    ]


@st.composite
def limits(draw: st.DrawFn) -> EngineLimits:
    """Budgets of one row and more, blocks of one token and more, memory for one context and more.

    With the cache on and off, and whatever prompts may take beside decodes.
    """
    block_size = draw(st.sampled_from([1, 3, 8, MAX_MODEL_LEN]))
    return make_limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 7, 20, 64])),
        max_prompt_rows_beside_decodes=draw(st.sampled_from([1, 5, 32])),
        block_size=block_size,
        num_blocks=-(-MAX_MODEL_LEN // block_size) + draw(st.integers(0, 8)),
        prefix_cache=draw(st.booleans()),
    )


@settings(max_examples=200)
@given(
    arrivals=arrivals(),
    drafter_class=st.sampled_from(DRAFTERS),
    num_speculative_tokens=st.sampled_from([0, 1, 2, 5, 16]),
    limits=limits(),
    draft_context=st.none() | st.integers(1, 40),
)
def test_tokens_are_the_models_own_and_everything_returns(
    arrivals: list[Arrival],
    drafter_class: type[FakeDrafter],
    num_speculative_tokens: int,
    limits: EngineLimits,
    draft_context: int | None,
) -> None:
    """Any arrivals, aborts, K, limits and drafters: Same as row by row; nothing leaks.

    The same with the cache on and off, and whoever is preempted for whom.
    """
    drafter = drafter_class(MODEL, context_limit=draft_context)

    async def play() -> list[Recorder]:
        by_id = {f"r{index}": arrival for index, arrival in enumerate(arrivals)}
        recorders = {
            name: Recorder(replace(a.request, request_id=name)) for name, a in by_id.items()
        }
        unsent = set(by_id)

        def tick(step: StepInput) -> None:
            for name in sorted(unsent):
                if by_id[name].step <= step.step_id:
                    unsent.remove(name)
                    engine.submit(recorders[name].request, recorders[name])
            for name, arrival in by_id.items():
                if arrival.abort_step == step.step_id:
                    engine.abort(name)

        target = make_fake_target(limits, during_step=tick)
        engine = make_engine(
            target, drafter, limits=limits, num_speculative_tokens=num_speculative_tokens
        )
        tick(StepInput(min(arrival.step for arrival in arrivals), ()))
        async with running(engine):
            while unsent or not all(r.finished.is_set() for n, r in recorders.items()):
                waiting = [r.finished.wait() for n, r in recorders.items() if n not in unsent]
                await asyncio.wait_for(asyncio.gather(*waiting), 20)
                if unsent:
                    tick(StepInput(min(by_id[name].step for name in unsent), ()))
            await asyncio.sleep(0)
            load = engine.load()
        assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
        assert not drafter.held
        return list(recorders.values())

    for recorder in asyncio.run(play()):
        _check(recorder)


def _check(recorder: Recorder) -> None:
    """The whole answer, or when aborted the start of it."""
    answer = recorder.answer()
    expected = reference(MODEL, recorder.request, max_model_len=MAX_MODEL_LEN)
    if answer.finish_reason is FinishReason.ABORT:
        assert answer.token_ids == expected.token_ids[: answer.num_tokens]
        assert answer.logprobs == expected.logprobs[: answer.num_tokens]
    else:
        assert answer == expected
    if recorder.request.prompt_logprobs and answer.num_tokens:
        assert recorder.prompt_logprobs == _scores(recorder.request.prompt_token_ids)


def _scores(prompt: Sequence[int]) -> tuple[float, ...]:
    """What the model says of each token of the prompt but the first."""
    return tuple(
        MODEL.logprob(MODEL.state(prompt[:length]), prompt[length])
        for length in range(1, len(prompt))
    )
