"""Conformance on a fake target: where answers end, where drafting ends, and what is counted."""

import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import ContextExceeded
from cluster.request import FinishReason
from tests.fakes import FakeModel, SameDrafter, SiblingDrafter
from tests.harness import (
    SAMPLED,
    ask,
    check_same,
    fake_answers,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    reference,
    running,
    series,
)

MODEL = FakeModel()

every_k = pytest.mark.parametrize("k", [1, 2, 5, 16])


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
    [recorder] = await fake_answers([request], SameDrafter(MODEL), k=16, limits=limits)
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
    [recorder] = await fake_answers([request], SameDrafter(MODEL), k=k, limits=limits)
    check_same([recorder], limits)
    assert recorder.answer().num_tokens == max_tokens


async def test_x30_a_stop_id_inside_an_accepted_run_ends_there() -> None:
    """The 4th token declared a stop id: usage 4, and nothing after it in the stream."""
    limits = make_limits()
    plain = reference(MODEL, make_request([2, 9], ignore_eos=True), max_model_len=256)
    request = make_request([2, 9], ignore_eos=True, stop_token_ids=(plain.token_ids[3],))
    assert plain.token_ids[3] not in plain.token_ids[:3]
    [recorder] = await fake_answers([request], SameDrafter(MODEL), k=5, limits=limits)
    check_same([recorder], limits)
    assert recorder.answer().token_ids == plain.token_ids[:4]
    assert recorder.answer().finish_reason is FinishReason.STOP


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
