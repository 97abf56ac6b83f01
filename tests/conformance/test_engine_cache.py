"""Conformance of the KV memory on a real transformer: what was computed for others, in any layout.

Everything is compared, to the last bit of every logprob, with the same request alone in a fresh
engine that has one block a context, no cache and no drafter.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.request import Request, SamplingParams
from tests.conformance.answers import Whole, whole
from tests.conformance.lab import VOCAB_SIZE, Lab
from tests.harness import GREEDY, Recorder, ask, make_limits, make_request, running

CONTEXT = 320
SAMPLED = SamplingParams(seed=7, temperature=0.8, top_p=0.95)
BLOCK_SIZES = (16, 24, 64, 100, 256, CONTEXT)
PROMPT = tuple((17 * i * i + 5 * i) % 500 + 3 for i in range(200))


def limits_of(block_size: int, **changes: float) -> EngineLimits:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "max_model_len": CONTEXT,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": block_size,
    }
    return make_limits(**(sizes | changes))


def request_of(
    prompt: Sequence[int],
    *,
    name: str = "request",
    sampling: SamplingParams = GREEDY,
    max_tokens: int = 12,
    **changes: object,
) -> Request:
    request = make_request(
        prompt, request_id=name, sampling=sampling, max_tokens=max_tokens, ignore_eos=True
    )
    return replace(request, prompt_logprobs=True, top_logprobs=3, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def engine_of(
    lab: Lab, limits: EngineLimits, *, drafter: str = "off", k: int = 0
) -> AsyncIterator[Engine]:
    """A running engine over the lab's target, in which nothing may be left."""
    with lab.engine(drafter, k=k, limits=limits) as engine:
        async with running(engine):
            yield engine
            load = engine.load()
        assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)


ANSWERS: dict[Request, Whole] = {}  # those of `alone`


async def alone(lab: Lab, request: Request) -> Whole:
    """The request in a fresh engine with nothing in it that could go wrong."""
    if request not in ANSWERS:
        async with engine_of(lab, limits_of(CONTEXT, prefix_cache=False)) as engine:
            [recorder] = await ask(engine, [request])
        assert recorder.num_cached == 0
        ANSWERS[request] = whole(recorder)
    return ANSWERS[request]


def unscored(request: Request) -> Request:
    """The request without prompt logprobs, which would have every row of it computed."""
    return replace(request, prompt_logprobs=False)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
async def test_x22_a_prefix_that_is_at_hand_changes_no_bit(
    lab: Lab, block_size: int, sampling: SamplingParams
) -> None:
    """Miss, whole hit, a next turn, another end: Same, whether blocks are shared, taken or copied.

    With a block a context the next turn takes the entry over and the rest are copies.
    """
    first = unscored(request_of(PROMPT[:150], sampling=sampling))
    expected = await alone(lab, first)
    history = (*first.prompt_token_ids, *expected.answer.token_ids)
    asked = [
        (first, 0),
        (first, 149),
        (unscored(request_of((*history, 9, 8, 7), sampling=sampling)), len(history) - 1),
        (unscored(request_of((*PROMPT[:130], 4, 4, 4), sampling=sampling)), 130),
        (unscored(request_of((*PROMPT[:40], 5), sampling=sampling)), 40),
    ]
    async with engine_of(lab, limits_of(block_size), drafter="ngram", k=4) as engine:
        for request, num_settled in asked:
            [recorder] = await ask(engine, [request])
            assert whole(recorder) == await alone(lab, request)
            num_full = num_settled // block_size * block_size
            num_more = num_settled - num_full
            assert recorder.num_cached in {num_full, num_full + num_more}
            assert recorder.num_cached == num_settled or num_more < 8


@pytest.mark.parametrize("block_size", [16, CONTEXT])
async def test_x22_the_settled_part_of_a_running_sequence_is_at_hand(
    lab: Lab, block_size: int
) -> None:
    """A request that comes while another decodes begins with what that one has computed: Same."""
    long = unscored(request_of(PROMPT[:150], name="long", sampling=SAMPLED, max_tokens=60))
    other = unscored(request_of((*PROMPT[:140], 9), name="other", sampling=SAMPLED))
    async with engine_of(lab, limits_of(block_size), drafter="ngram", k=4) as engine:
        begun = asyncio.Event()
        first = Recorder(long)

        def emit(delta: object) -> None:
            first(delta)  # type: ignore[arg-type]
            begun.set()

        engine.submit(long, emit)
        await begun.wait()
        [second] = await ask(engine, [other])
        assert not first.finished.is_set()
        await first.finished.wait()
    assert second.num_cached == 140
    assert whole(second) == await alone(lab, other)
    assert whole(first) == await alone(lab, long)


@pytest.mark.parametrize("block_size", [16, CONTEXT])
async def test_x22_after_a_cancel_the_retry_is_the_same(lab: Lab, block_size: int) -> None:
    """Cancelled in the middle and asked again: what was settled is used, and nothing else."""
    request = unscored(request_of(PROMPT[:100], sampling=SAMPLED, max_tokens=40))
    expected = await alone(lab, request)
    async with engine_of(lab, limits_of(block_size), drafter="ngram", k=4) as engine:
        stream = engine.generate(request)
        async for delta in stream:
            assert delta.token_ids[0] == expected.answer.token_ids[0]
            break
        await stream.aclose()
        [retry] = await ask(engine, [request])
    assert retry.num_cached == (96 if block_size == 16 else 99)  # three are not worth a copy
    assert whole(retry) == expected


async def test_other_salts_share_nothing(lab: Lab) -> None:
    """What one tenant's prompt left is found by that tenant only."""
    async with engine_of(lab, limits_of(16)) as engine:
        cached = []
        for salt in ("", "a", "b", "a", ""):
            request = unscored(request_of(PROMPT[:100], cache_salt=salt))
            [recorder] = await ask(engine, [request])
            cached.append(recorder.num_cached)
    assert cached == [0, 0, 0, 96, 96]


@pytest.mark.parametrize("block_size", [16, 2100])
async def test_x56_the_same_prompt_twice_speculation_off_and_on(lab: Lab, block_size: int) -> None:
    """A prompt of 2,000 tokens twice: as many are cached with drafts as without, all but one."""
    prompt = [(31 * i * i + i) % 500 + 3 for i in range(2000)]
    cached = []
    for drafter, k in (("off", 0), ("ngram", 5), ("sibling", 5)):
        limits = limits_of(block_size, max_model_len=2100, max_num_batched_tokens=512)
        async with engine_of(lab, limits, drafter=drafter, k=k) as engine:
            for _ in range(2):
                [recorder] = await ask(engine, [unscored(request_of(prompt))])
                cached.append(recorder.num_cached)
    assert cached == [0, 1999] * 3


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
async def test_any_block_size_gives_the_same_bits(lab: Lab, block_size: int) -> None:
    """Six requests at once, with drafts and prompt logprobs, paged and contiguous: Same."""
    asked = [
        request_of(PROMPT[i : 30 * (i + 1)], name=str(i), sampling=SAMPLED, max_tokens=20)
        for i in range(6)
    ]
    async with engine_of(lab, limits_of(block_size), drafter="ngram", k=4) as engine:
        recorders = await ask(engine, asked)
    for recorder in recorders:
        assert whole(recorder) == await alone(lab, recorder.request)
        num_scores = len(recorder.request.prompt_token_ids) - 1
        assert len(recorder.prompt_logprobs) == num_scores
