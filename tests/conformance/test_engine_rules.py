"""Conformance of the engine on a fake target: every drafter, every K, in milliseconds.

The fake target checks each step it is given (see tests/fakes.py), so these tests also say that
memory, positions and tables are right at every step on the way to the right text.
"""

import asyncio
import random
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from cluster.drafters.choice import ChoiceDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.engine.limits import EngineLimits
from cluster.errors import DrafterUnavailable
from cluster.interfaces import Drafter, DraftQuery
from cluster.request import Request, SamplingParams
from tests.fakes import (
    DyingDrafter,
    FakeModel,
    LateDrafter,
    LyingDrafter,
    RandomDrafter,
    SameDrafter,
    SiblingDrafter,
    SilentDrafter,
)
from tests.harness import (
    GREEDY,
    SAMPLED,
    Recorder,
    ask,
    check_same,
    fake_answers,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    running,
    series,
)

MODEL = FakeModel()
DRAFTERS: dict[str, Callable[[FakeModel], Drafter]] = {
    "same": SameDrafter,
    "random": RandomDrafter,
    "sibling": SiblingDrafter,
    "silent": SilentDrafter,
    "dying": DyingDrafter,
    "late": LateDrafter,
    "lying": LyingDrafter,
    "ngram": lambda _: NgramDrafter(),
    "choice": lambda model: ChoiceDrafter(
        free=[LyingDrafter(model), NgramDrafter(tenant_memory_tokens=1000)],
        paid=[SiblingDrafter(model), DyingDrafter(model), LateDrafter(model)],
        patience_seconds=0.001,
    ),
}
K = (1, 2, 5, 16)

every_drafter = pytest.mark.parametrize("drafter_name", DRAFTERS)
every_k = pytest.mark.parametrize("k", K)


def prompts() -> list[list[int]]:
    """50 prompts: one a word repeated 48 times, one a single token, one of 2,000 tokens."""
    rng = random.Random(1)
    others = [rng.choices(range(32), k=rng.randint(2, 40)) for _ in range(47)]
    return [[5, 6, 7, 8] * 48, [3], rng.choices(range(32), k=2000), *others]


def requests(sampling: SamplingParams, max_tokens: int) -> list[Request]:
    return [
        make_request(prompt, request_id=str(index), sampling=sampling, max_tokens=max_tokens)
        for index, prompt in enumerate(prompts())
    ]


def wide_limits(max_num_seqs: int = 8) -> EngineLimits:
    """Room for 2,100 tokens; a deadline that the late drafter misses at once."""
    return make_limits(
        max_model_len=2100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=300,
        draft_deadline_seconds=0.001,
    )


@every_drafter
@every_k
async def test_x01_every_drafter_and_k_give_the_plain_answer(drafter_name: str, k: int) -> None:
    """Greedy: tokens, logprob bits, finish reason and usage are those of the target alone."""
    limits = wide_limits()
    drafter = DRAFTERS[drafter_name](MODEL)
    recorders = await fake_answers(requests(GREEDY, 8), drafter, k=k, limits=limits)
    check_same(recorders, limits)


@every_drafter
@every_k
async def test_x22_the_seed_decides_whatever_the_drafter_and_k(drafter_name: str, k: int) -> None:
    """Seed 7, sampled: Same with K = 1, 2, 5, 16 as without speculation."""
    limits = make_limits(draft_deadline_seconds=0.001)
    asked = [
        make_request([1, index], request_id=str(index), sampling=SAMPLED) for index in range(8)
    ]
    recorders = await fake_answers(asked, DRAFTERS[drafter_name](MODEL), k=k, limits=limits)
    check_same(recorders, limits)


async def test_x04_no_token_is_skipped_or_doubled() -> None:
    """K = 1, blind guesses, 200 sampled tokens, against the row-by-row reference."""
    limits = make_limits()
    request = make_request([1, 2, 3], sampling=SAMPLED, max_tokens=200, ignore_eos=True)
    [recorder] = await fake_answers([request], RandomDrafter(MODEL), k=1, limits=limits)
    check_same([recorder], limits)
    assert 0 < recorder.num_accepted < recorder.num_drafted / 4


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize("drafter_name", ["same", "sibling", "random"])
async def test_x07_neighbours_change_nothing(drafter_name: str, concurrency: int) -> None:
    """50 prompts with random arrivals at concurrency 1, 8 and 32: Same, each of them."""
    limits = wide_limits(concurrency)
    rng = random.Random(3)
    drafter = DRAFTERS[drafter_name](MODEL)
    engine = make_engine(make_fake_target(limits), drafter, limits=limits, num_speculative_tokens=5)
    gate = asyncio.Semaphore(concurrency)

    async def one(request: Request) -> Recorder:
        async with gate:
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            [recorder] = await ask(engine, [request])
            return recorder

    async with running(engine):
        recorders = await asyncio.gather(*(one(request) for request in requests(SAMPLED, 12)))
    check_same(recorders, limits)


async def test_x08_a_tight_budget_and_lost_rounds_change_nothing() -> None:
    """Budget 3 for six sequences, and blocks so few that decodes are put back and go on later."""
    limits = make_limits(
        max_model_len=24, max_num_seqs=6, max_num_batched_tokens=3, block_size=2, num_blocks=13
    )
    target = make_fake_target(limits)
    engine = make_engine(target, SiblingDrafter(MODEL), limits=limits)
    asked = [
        make_request([index] * (index + 1), request_id=str(index), max_tokens=15, ignore_eos=True)
        for index in range(6)
    ]
    async with running(engine):
        recorders = await ask(engine, asked)
    check_same(recorders, limits)
    begun = [rows.seq_id for step in target.steps for rows in step.sequences if rows.start == 0]
    assert len(begun) > len(set(begun)), "nobody was put back: the test tests nothing"


class Awakening(SameDrafter):
    """Has nothing to say for 100 calls, then knows everything."""

    def draft(self, query: DraftQuery) -> list[int]:
        """Nothing, then the truth."""
        return list(super().draft(query)) if len(self.queries) > 100 else []


async def test_x53_a_drafter_that_wakes_up_late_changes_nothing() -> None:
    """No match for 100 steps, then matches: Same, and the drafts of the end are used."""
    limits = make_limits()
    request = make_request([1, 2], max_tokens=150, ignore_eos=True)
    [recorder] = await fake_answers([request], Awakening(MODEL), k=4, limits=limits)
    check_same([recorder], limits)
    assert recorder.num_accepted > 30
    assert all(delta.num_drafted == 0 for delta in recorder.deltas[:100])


@pytest.mark.parametrize(
    ("name", "reason"), [("dying", "died"), ("late", "late"), ("busy", "busy")]
)
async def test_a_failing_drafter_is_counted_by_its_reason(
    name: str, reason: str, registry: CollectorRegistry
) -> None:
    """Drafts fail open: the answer is Same, the reason is in the metrics."""
    limits = make_limits(draft_deadline_seconds=0.01)
    drafters = DRAFTERS | {
        "busy": lambda model: DyingDrafter(model, error=DrafterUnavailable("busy"))
    }
    engine = make_engine(
        make_fake_target(limits), drafters[name](MODEL), limits=limits, registry=registry
    )
    async with running(engine):
        recorders = await ask(engine, [make_request([1], max_tokens=40, ignore_eos=True)])
    check_same(recorders, limits)
    assert series(registry)[f"drafthouse_drafter_unavailable_total{{reason={reason}}}"] > 0


async def test_x20_the_seed_repeats_and_another_seed_does_not() -> None:
    """Seed 7 twice and in a new engine: equal; seed 8: different."""
    limits = make_limits()
    asked = [
        make_request([1, 2], request_id=str(index), sampling=SamplingParams(seed=seed))
        for index, seed in enumerate((7, 7, 8))
    ]
    first = await fake_answers(asked, SiblingDrafter(MODEL), k=5, limits=limits)
    again = await fake_answers(asked[:1], SiblingDrafter(MODEL), k=5, limits=limits)
    seven, same, eight, restarted = (recorder.answer() for recorder in [*first, *again])
    assert seven == same == restarted
    assert seven.token_ids != eight.token_ids


async def test_x22_cancel_and_retry_repeats_the_answer() -> None:
    """A request aborted half-way and sent again gives what it would have given."""
    limits = make_limits()
    request = make_request([1, 2], sampling=SAMPLED, ignore_eos=True)
    engine = make_engine(make_fake_target(limits), SiblingDrafter(MODEL), limits=limits)
    async with running(engine):
        stream = engine.generate(request)
        await anext(stream)
        await stream.aclose()
        [recorder] = await ask(engine, [request])
    check_same([recorder], limits)
