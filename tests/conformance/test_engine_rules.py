"""Conformance of the engine on a fake target: every drafter, every K, in milliseconds.

The fake target checks each step it is given (see tests/fakes.py), so these tests also say that
memory, positions and tables are right at every step on the way to the right text.
"""

import asyncio
import random
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from cluster.drafters.ngram import NgramDrafter
from cluster.engine.limits import EngineLimits
from cluster.errors import ContextExceeded, DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import StepInput
from cluster.request import FinishReason, Request, SamplingParams
from tests.fakes import (
    DyingDrafter,
    FakeDrafter,
    FakeModel,
    LateDrafter,
    LyingDrafter,
    RandomDrafter,
    SameDrafter,
    SiblingDrafter,
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
DRAFTERS: dict[str, Callable[[FakeModel], FakeDrafter | NgramDrafter]] = {
    "same": SameDrafter,
    "random": RandomDrafter,
    "sibling": SiblingDrafter,
    "silent": SilentDrafter,
    "dying": DyingDrafter,
    "late": LateDrafter,
    "lying": LyingDrafter,
    "ngram": lambda _: NgramDrafter(),
}
SAMPLED = SamplingParams(seed=7, temperature=1.0)
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


async def answers(
    asked: list[Request], drafter: FakeDrafter | NgramDrafter, *, k: int, limits: EngineLimits
) -> list[Recorder]:
    """All answers of an engine of its own; nothing is left in it."""
    engine = make_engine(make_fake_target(limits), drafter, limits=limits, num_speculative_tokens=k)
    async with running(engine):
        recorders = await ask(engine, asked)
        load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    return recorders


def check_same(recorders: list[Recorder], limits: EngineLimits) -> None:
    for recorder in recorders:
        expected = reference(MODEL, recorder.request, max_model_len=limits.max_model_len)
        assert recorder.answer() == expected


@every_drafter
@every_k
async def test_x01_every_drafter_and_k_give_the_plain_answer(drafter_name: str, k: int) -> None:
    """Greedy: tokens, logprob bits, finish reason and usage are those of the target alone."""
    limits = wide_limits()
    drafter = DRAFTERS[drafter_name](MODEL)
    recorders = await answers(
        requests(SamplingParams(seed=0, temperature=0.0), 8), drafter, k=k, limits=limits
    )
    check_same(recorders, limits)


@every_drafter
@every_k
async def test_x22_the_seed_decides_whatever_the_drafter_and_k(drafter_name: str, k: int) -> None:
    """Seed 7, sampled: Same with K = 1, 2, 5, 16 as without speculation."""
    limits = make_limits(draft_deadline_seconds=0.001)
    asked = [
        make_request([1, index], request_id=str(index), sampling=SAMPLED) for index in range(8)
    ]
    recorders = await answers(asked, DRAFTERS[drafter_name](MODEL), k=k, limits=limits)
    check_same(recorders, limits)


async def test_x04_no_token_is_skipped_or_doubled() -> None:
    """K = 1, blind guesses, 200 sampled tokens, against the row-by-row reference."""
    limits = make_limits()
    request = make_request([1, 2, 3], sampling=SAMPLED, max_tokens=200, ignore_eos=True)
    [recorder] = await answers([request], RandomDrafter(MODEL), k=1, limits=limits)
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


async def test_x09_drafts_come_only_after_the_last_chunk() -> None:
    """A prompt of three chunks: no draft rows and no query before it is whole."""
    limits = make_limits(max_num_batched_tokens=8)
    target, drafter = make_fake_target(limits), SameDrafter(MODEL)
    engine = make_engine(target, drafter, limits=limits)
    async with running(engine):
        recorders = await ask(engine, [make_request(range(20), ignore_eos=True)])
    check_same(recorders, limits)
    chunks = [
        (len(step.sequences[0].token_ids), step.sequences[0].num_drafts) for step in target.steps
    ]
    assert chunks[:4] == [(8, 0), (8, 0), (4, 0), (5, 4)]
    assert min(length for _, length, _ in drafter.queries) == 21


@every_k
async def test_x10_a_full_draft_context_ends_drafting_not_the_answer(
    k: int, registry: CollectorRegistry
) -> None:
    """Draft context 64, prompt 60, 100 new tokens: all come, and a counter says why drafts end."""
    limits = make_limits()
    drafter = SameDrafter(MODEL, context_limit=64)
    engine = make_engine(
        make_fake_target(limits),
        drafter,
        limits=limits,
        num_speculative_tokens=k,
        registry=registry,
    )
    async with running(engine):
        prompt = [token % 32 for token in range(60)]
        recorders = await ask(engine, [make_request(prompt, max_tokens=100, ignore_eos=True)])
    check_same(recorders, limits)
    assert recorders[0].answer().num_tokens == 100
    assert series(registry)["drafthouse_draft_limited_total{reason=draft_context}"] > 0
    assert 61 <= max(length + wanted for _, length, wanted in drafter.queries) <= 64


@pytest.mark.parametrize("prompt_length", range(56, 64))
async def test_x11_an_answer_ends_exactly_at_the_context(prompt_length: int) -> None:
    """Context 64, K = 16, no max_tokens: `length`, and prompt and answer are 64 together."""
    limits = make_limits(max_model_len=64)
    request = make_request(
        [token % 32 for token in range(prompt_length)], max_tokens=None, ignore_eos=True
    )
    [recorder] = await answers([request], SameDrafter(MODEL), k=16, limits=limits)
    check_same([recorder], limits)
    assert recorder.answer().finish_reason is FinishReason.LENGTH
    assert recorder.answer().num_tokens == 64 - prompt_length


async def test_x11_a_prompt_that_fills_the_context_is_refused() -> None:
    """A prompt of 64 in a context of 64 is the caller's error, with both numbers."""
    limits = make_limits(max_model_len=64)
    engine = make_engine(make_fake_target(limits), SameDrafter(MODEL), limits=limits)
    with pytest.raises(ContextExceeded):
        engine.submit(make_request([1] * 64), lambda _: None)


@every_k
@pytest.mark.parametrize("more", [1, 2, "k", "k+1"])
async def test_x14_max_tokens_is_exact(k: int, more: int | str) -> None:
    """max_tokens of 1, 2, K and K + 1 with a drafter that is always right: that many tokens."""
    max_tokens = {"k": k, "k+1": k + 1}.get(str(more), 0) or int(more)
    limits = make_limits()
    request = make_request([1, 2], max_tokens=max_tokens, ignore_eos=True)
    [recorder] = await answers([request], SameDrafter(MODEL), k=k, limits=limits)
    check_same([recorder], limits)
    assert recorder.answer().num_tokens == max_tokens


async def test_x20_the_seed_repeats_and_another_seed_does_not() -> None:
    """Seed 7 twice and in a new engine: equal; seed 8: different."""
    limits = make_limits()
    asked = [
        make_request([1, 2], request_id=str(index), sampling=SamplingParams(seed=seed))
        for index, seed in enumerate((7, 7, 8))
    ]
    first = await answers(asked, SiblingDrafter(MODEL), k=5, limits=limits)
    again = await answers(asked[:1], SiblingDrafter(MODEL), k=5, limits=limits)
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


async def test_x30_a_stop_id_inside_an_accepted_run_ends_there() -> None:
    """The 4th token declared a stop id: usage 4, and nothing after it in the stream."""
    limits = make_limits()
    plain = reference(MODEL, make_request([2, 9], ignore_eos=True), max_model_len=256)
    request = make_request([2, 9], ignore_eos=True, stop_token_ids=(plain.token_ids[3],))
    assert plain.token_ids[3] not in plain.token_ids[:3]
    [recorder] = await answers([request], SameDrafter(MODEL), k=5, limits=limits)
    check_same([recorder], limits)
    assert recorder.answer().token_ids == plain.token_ids[:4]
    assert recorder.answer().finish_reason is FinishReason.STOP


class Awakening(SameDrafter):
    """Has nothing to say for 100 calls, then knows everything."""

    def draft(self, query: DraftQuery) -> list[int]:
        """Nothing, then the truth."""
        return list(super().draft(query)) if len(self.queries) > 100 else []


async def test_x53_a_drafter_that_wakes_up_late_changes_nothing() -> None:
    """No match for 100 steps, then matches: Same, and the drafts of the end are used."""
    limits = make_limits()
    request = make_request([1, 2], max_tokens=150, ignore_eos=True)
    [recorder] = await answers([request], Awakening(MODEL), k=4, limits=limits)
    check_same([recorder], limits)
    assert recorder.num_accepted > 30
    assert all(delta.num_drafted == 0 for delta in recorder.deltas[:100])


async def test_x60_what_is_cut_by_a_stop_is_not_counted(registry: CollectorRegistry) -> None:
    """Run [d1, d2, EOS, d4, d5, bonus]: emitted 3, drafted 5, accepted 3; counters agree."""
    limits = make_limits()
    plain = reference(MODEL, make_request([2, 9], ignore_eos=True), max_model_len=256).token_ids
    assert plain[3] not in plain[:3]
    engine = make_engine(
        make_fake_target(limits),
        SameDrafter(MODEL),
        limits=limits,
        num_speculative_tokens=5,
        eos_token_ids=[plain[3]],
        registry=registry,
    )
    async with running(engine):
        [recorder] = await ask(engine, [make_request([2, 9])])
    last = recorder.deltas[-1]
    assert (last.token_ids, last.num_drafted, last.num_accepted) == (plain[1:4], 5, 3)
    counted = series(registry)
    assert counted["drafthouse_engine_tokens_total"] == recorder.answer().num_tokens == 4
    assert counted["drafthouse_spec_decode_num_draft_tokens_total"] == 5
    assert counted["drafthouse_spec_decode_num_accepted_tokens_total"] == 3


async def test_x60_sums_over_requests_are_the_counters(registry: CollectorRegistry) -> None:
    """Drafted, accepted, per position and emitted: over many requests nothing is lost."""
    limits = make_limits()
    engine = make_engine(
        make_fake_target(limits), SiblingDrafter(MODEL), limits=limits, registry=registry
    )
    asked = [
        make_request([index], request_id=str(index), sampling=SAMPLED, max_tokens=30)
        for index in range(30)
    ]
    async with running(engine):
        recorders = await ask(engine, asked)
    counted = series(registry)
    prefix = "drafthouse_spec_decode_num"
    drafted = sum(recorder.num_drafted for recorder in recorders)
    accepted = sum(recorder.num_accepted for recorder in recorders)
    per_position = [
        value
        for name, value in counted.items()
        if name.startswith(f"{prefix}_accepted_tokens_per_pos_total")
    ]
    assert counted[f"{prefix}_draft_tokens_total"] == drafted
    assert counted[f"{prefix}_accepted_tokens_total"] == accepted == sum(per_position)
    assert counted["drafthouse_engine_tokens_total"] == sum(
        r.answer().num_tokens for r in recorders
    )
    assert per_position == sorted(per_position, reverse=True)


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


class Interrupted(SameDrafter):
    """Calls `during_draft` while it proposes."""

    def __init__(self, model: FakeModel, during_draft: Callable[[DraftQuery], None]) -> None:
        super().__init__(model)
        self._during_draft = during_draft

    def draft(self, query: DraftQuery) -> list[int]:
        """The truth, but meanwhile the client has gone."""
        self._during_draft(query)
        return list(super().draft(query))


@pytest.mark.parametrize("phase", ["queued", "prefill", "drafting", "verifying", "last token"])
async def test_x70_a_cancel_in_any_phase_ends_within_a_step_and_leaves_nothing(phase: str) -> None:
    """The last delta at once; blocks, places and draft state back; neighbours do not notice."""
    limits = make_limits(max_num_seqs=2, max_num_batched_tokens=16)
    cancelled_at: list[int] = []

    def cancel() -> None:
        cancelled_at.append(engine.load().step_id)
        engine.abort("victim")

    def during_step(step: StepInput) -> None:
        if (
            (phase in ("queued", "prefill") and step.step_id == 2)
            or (phase == "verifying" and step.step_id == 4)
            or (phase == "last token" and _brings_last_token(step))
        ):
            cancel()

    def during_draft(query: DraftQuery) -> None:
        if phase == "drafting" and query.seq_id == 1 and len(query.token_ids) > 32:
            cancel()

    target = make_fake_target(limits, during_step)
    drafter = Interrupted(MODEL, during_draft)
    engine = make_engine(target, drafter, limits=limits, num_speculative_tokens=3)
    victim = Recorder(make_request(range(30), request_id="victim", max_tokens=12, ignore_eos=True))
    others = [
        Recorder(make_request([5, index], request_id=str(index), max_tokens=60, ignore_eos=True))
        for index in range(2)
    ]
    arrivals = [*others, victim] if phase == "queued" else [victim, *others]
    async with running(engine):
        for recorder in arrivals:
            engine.submit(recorder.request, recorder)
        for recorder in arrivals:
            await recorder.finished.wait()
        await asyncio.sleep(0)
        load = engine.load()
    assert victim.answer().finish_reason is FinishReason.ABORT
    expected = reference(MODEL, victim.request, max_model_len=256).token_ids
    assert victim.answer().token_ids == expected[: victim.answer().num_tokens]
    check_same(others, limits)
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    assert not drafter.held
    [cancelled_in] = cancelled_at
    victim_id = 1 + arrivals.index(victim)
    steps_of_victim = [
        step.step_id
        for step in target.steps
        if victim_id in (rows.seq_id for rows in step.sequences)
    ]
    assert max(steps_of_victim, default=0) <= cancelled_in


def _brings_last_token(step: StepInput) -> bool:
    """Whether the victim (sequence 1, 30 + 12 tokens) gets its last token in this step."""
    return any(
        rows.seq_id == 1 and rows.sampling is not None and rows.start + len(rows.token_ids) == 41
        for rows in step.sequences
    )
