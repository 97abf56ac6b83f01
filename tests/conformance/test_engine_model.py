"""Conformance of the engine on a real transformer: a tiny random float32 llama, real drafters.

"Same" means equal token ids, logprob bits, finish reason and usage as with speculation off, and
off itself is compared with the decoder run one row at a time, without any engine.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.drafters.ngram import NgramDrafter
from cluster.errors import UnsupportedArchitecture, UnsupportedFeature
from cluster.messages import Rule, StepInput, StepOutput
from cluster.models.load import load_decoder
from cluster.request import FinishReason, SamplingParams
from cluster.worker import TargetWorker, ThreadTarget
from tests.checkpoints import edit_config
from tests.conformance.answers import answered
from tests.conformance.inputs import (
    SAMPLED,
    K,
    assert_always_right,
    fifty_requests,
    limits_of,
    prompts,
    wide_limits,
)
from tests.conformance.lab import EOS_TOKEN_ID, Lab, Place
from tests.conformance.rows import row_by_row
from tests.harness import GREEDY, Recorder, make_engine, make_request, running

SEED_OF_A_LATE_MATCH = 9  # at T = 1 the first pair that repeats does so after 100 tokens

every_rule = pytest.mark.parametrize("rule", Rule)


@pytest.mark.parametrize(
    ("drafter_name", "k"),
    [(name, k) for name in ("same", "sibling", "random", "ngram", "remote sibling") for k in K]
    + [("silent", 5), ("dying", 5), ("late", 5), ("choice", 2), ("choice", 8)],
)
async def test_x01_every_drafter_and_k_give_the_plain_answer(
    lab: Lab, drafter_name: str, k: int
) -> None:
    """50 prompts, T = 0: Same for every drafter and K."""
    limits = wide_limits()
    if drafter_name == "late":
        limits = replace(limits, draft_deadline_seconds=0.02)
    recorders = await lab.recorders(fifty_requests(), drafter_name, k=k, limits=limits)
    await lab.check_same(recorders, limits)
    drafted = sum(recorder.num_drafted for recorder in recorders)
    accepted = sum(recorder.num_accepted for recorder in recorders)
    assert (drafted > 0) == (drafter_name != "silent")
    if drafter_name == "same":
        assert_always_right(recorders)
    if drafter_name in ("sibling", "remote sibling"):
        assert 0 < accepted < drafted


async def test_x02_state_that_cannot_be_rolled_back_is_refused_at_start(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A recurrent architecture, or linear attention in some layers: refused by name."""
    mamba = tmp_path / "mamba"
    mamba.mkdir()
    (mamba / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedArchitecture, match=r"mamba.*llama, mistral, qwen2, qwen3"):
        load_decoder(mamba, dtype="float32")
    hybrid = tmp_path / "hybrid"
    hybrid.mkdir()
    (hybrid / "config.json").write_text((checkpoints["target"] / "config.json").read_text())
    edit_config(hybrid, model_type="qwen3", layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UnsupportedFeature, match="linear_attention"):
        load_decoder(hybrid, dtype="float32")


async def test_x04_no_token_is_skipped_or_doubled(lab: Lab) -> None:
    """K = 1, blind guesses, T = 1, 200 tokens: the row-by-row reference to the last bit."""
    limits = limits_of()
    sampling = SamplingParams(seed=7, temperature=1.0)
    request = make_request([5, 6, 7], sampling=sampling, max_tokens=200, ignore_eos=True)
    [recorder] = await lab.recorders([request], "random", k=1, limits=limits)
    token_ids, logprobs = row_by_row(lab.decoders["target"], request, 200)
    assert recorder.answer().token_ids == tuple(token_ids)
    assert recorder.answer().logprobs == tuple(logprobs)
    assert recorder.num_drafted > 100


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_off_is_the_decoder_itself(lab: Lab, sampling: SamplingParams) -> None:
    """What everything is compared with: in a batch, equal to the row-by-row reference."""
    limits = limits_of()
    asked = [
        make_request(prompt, request_id=str(i), sampling=sampling, max_tokens=20, ignore_eos=True)
        for i, prompt in enumerate(prompts()[3:9])
    ]
    for recorder in await lab.recorders(asked, "off", k=0, limits=limits):
        token_ids, logprobs = row_by_row(lab.decoders["target"], recorder.request, 20)
        assert recorder.answer().token_ids == tuple(token_ids)
        assert recorder.answer().logprobs == tuple(logprobs)


@pytest.mark.parametrize(
    ("drafter_name", "concurrency", "rule"),
    [("sibling", concurrency, rule) for concurrency in (1, 8, 32) for rule in Rule]
    + [(name, 32, Rule.COUPLED) for name in ("same", "random", "ngram", "remote sibling")],
)
async def test_x07_neighbours_change_nothing(
    lab: Lab, drafter_name: str, concurrency: int, rule: Rule
) -> None:
    """50 prompts arriving at random times at concurrency 1, 8 and 32: Same, each of them."""
    recorders = await lab.recorders(
        fifty_requests(),
        drafter_name,
        k=5,
        limits=wide_limits(concurrency),
        rule=rule,
        concurrency=concurrency,
    )
    await lab.check_same(recorders, wide_limits())
    assert sum(recorder.num_drafted for recorder in recorders) > 0


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [(Rule.COUPLED, SAMPLED), (Rule.RATIO, GREEDY)],
    ids=["coupled", "ratio"],
)
@pytest.mark.parametrize("drafter_name", ["sibling", "ngram", "remote sibling"])
async def test_x08_a_tight_budget_and_lost_rounds_change_nothing(
    lab: Lab, drafter_name: str, rule: Rule, sampling: SamplingParams
) -> None:
    """Budget 5 for eight sequences, and blocks so few that decodes are put back: Same."""
    tight = limits_of(max_model_len=96, max_num_batched_tokens=5, block_size=4, num_blocks=40)
    asked = [
        make_request([5, 6, 7 + i] * 3, request_id=str(i), sampling=sampling, max_tokens=30)
        for i in range(8)
    ]
    recorders = await lab.recorders(asked, drafter_name, k=4, limits=tight, rule=rule)
    await lab.check_same(recorders, limits_of(max_model_len=96))


@pytest.mark.parametrize("budget", [7, 64])
async def test_x09_chunks_change_nothing_and_drafts_come_after_the_last(
    lab: Lab, budget: int
) -> None:
    """Prompts in three or more chunks: Same as in one piece."""
    limits = limits_of(max_num_batched_tokens=budget)
    asked = [
        make_request(range(3, 3 + 2 * budget + 5), request_id=str(i), max_tokens=15)
        for i in range(2)
    ]
    recorders = await lab.recorders(asked, "same", k=5, limits=limits)
    await lab.check_same(recorders, limits_of())
    assert all(recorder.num_accepted > 0 for recorder in recorders)


@pytest.mark.parametrize(
    ("drafter_name", "k", "rule"),
    [(name, k, Rule.COUPLED) for name in ("same", "remote same") for k in K]
    + [("same", 5, Rule.RATIO)],
)
async def test_x10_a_full_draft_context_ends_drafting_not_the_answer(
    lab: Lab, drafter_name: str, k: int, rule: Rule
) -> None:
    """Draft context 64, target 256, prompt 60: all 100 new tokens, Same."""
    limits = limits_of()
    request = make_request(range(3, 63), max_tokens=100, ignore_eos=True)
    with lab.engine(drafter_name, k=k, limits=limits, rule=rule, context=64) as engine:
        [recorder] = await answered(engine, [request], limits)
    await lab.check_same([recorder], limits)
    assert recorder.answer().num_tokens == 100
    assert 0 < recorder.num_drafted <= 4


@every_rule
async def test_x11_answers_end_exactly_at_the_context(lab: Lab, rule: Rule) -> None:
    """Context 64, prompts of 56 to 63, K = 16, no max_tokens: `length` at 64 together."""
    limits = limits_of(max_model_len=64)
    asked = [
        make_request(range(3, 3 + n), request_id=str(n), max_tokens=None, ignore_eos=True)
        for n in range(56, 64)
    ]
    recorders = await lab.recorders(asked, "same", k=16, limits=limits, rule=rule)
    await lab.check_same(recorders, limits)
    for recorder in recorders:
        answer = recorder.answer()
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.num_prompt_tokens + answer.num_tokens == 64


@pytest.mark.parametrize("k", K)
async def test_x14_max_tokens_is_exact(lab: Lab, k: int) -> None:
    """max_tokens of 1, 2, K and K + 1 with a drafter that is always right: that many tokens."""
    limits = limits_of()
    asked = [
        make_request([5, 6], request_id=str(n), max_tokens=n, ignore_eos=True)
        for n in {1, 2, k, k + 1}
    ]
    recorders = await lab.recorders(asked, "same", k=k, limits=limits)
    await lab.check_same(recorders, limits)
    assert all(r.answer().num_tokens == r.request.stopping.max_tokens for r in recorders)


async def test_x20_the_seed_repeats_and_another_seed_does_not(lab: Lab) -> None:
    """T = 0.8, seed 7 twice and after a restart: equal; seed 8: different."""
    limits = limits_of()
    asked = [
        make_request([5, 6], request_id=str(i), sampling=replace(SAMPLED, seed=seed))
        for i, seed in enumerate((7, 7, 8))
    ]
    first = await lab.recorders(asked, "sibling", k=5, limits=limits)
    again = await lab.recorders(asked[:1], "sibling", k=5, limits=limits)
    seven, same, eight, restarted = (recorder.answer() for recorder in [*first, *again])
    assert seven == same == restarted
    assert seven.token_ids != eight.token_ids


@pytest.mark.parametrize("drafter_name", ["same", "sibling", "random", "ngram", "remote sibling"])
async def test_x22_the_seed_decides_whatever_the_drafter_and_k(lab: Lab, drafter_name: str) -> None:
    """Seed 7, T = 0.8, top-k, top-p and min-p: Same with K = 1, 5, 16 and off."""
    limits = limits_of()
    sampling = replace(SAMPLED, top_k=50, top_p=0.95, min_p=0.01)
    asked = [
        make_request([5, 6, 5, i], request_id=str(i), sampling=sampling, max_tokens=16)
        for i in range(4)
    ]
    for k in (1, 5, 16):
        recorders = await lab.recorders(asked, drafter_name, k=k, limits=limits)
        await lab.check_same(recorders, limits)
        if drafter_name == "same":
            assert_always_right(recorders)


async def test_x22_a_moved_request_goes_on_exactly(lab: Lab) -> None:
    """Failover: with the tokens so far, another engine gives the rest, to the last bit."""
    limits = limits_of()
    request = make_request([5, 6], sampling=SAMPLED, max_tokens=20, ignore_eos=True)
    [whole] = await lab.recorders([request], "sibling", k=4, limits=limits)
    answer = whole.answer()
    moved = [
        replace(request, request_id=str(n), output_token_ids=answer.token_ids[:n])
        for n in (1, 7, 19)
    ]
    for recorder in await lab.recorders(moved, "sibling", k=4, limits=limits):
        done = len(recorder.request.output_token_ids)
        assert recorder.answer().token_ids == answer.token_ids[done:]
        assert recorder.answer().logprobs == answer.logprobs[done:]


async def test_x30_a_stop_id_inside_an_accepted_run_ends_there(lab: Lab) -> None:
    """The 4th token of the greedy run declared a stop id: usage 4, nothing after it."""
    limits = limits_of()
    request = make_request([5, 6, 8], ignore_eos=True)
    [plain] = await lab.recorders([request], "off", k=0, limits=limits)
    token_ids = plain.answer().token_ids
    assert token_ids[3] not in token_ids[:3]
    stopped = make_request([5, 6, 8], ignore_eos=True, stop_token_ids=(token_ids[3],))
    [recorder] = await lab.recorders([stopped], "same", k=5, limits=limits)
    assert recorder.answer().token_ids == token_ids[:4]
    assert recorder.answer().finish_reason is FinishReason.STOP
    assert recorder.deltas[-1].num_drafted == 5
    assert recorder.deltas[-1].num_accepted == 3


async def test_x53_a_match_after_a_hundred_steps_without_one(lab: Lab) -> None:
    """n-gram has nothing for 100 steps, then copies: Same."""
    limits = limits_of()
    request = make_request(
        [5],
        sampling=SamplingParams(seed=SEED_OF_A_LATE_MATCH, temperature=1.0),
        max_tokens=140,
        ignore_eos=True,
    )
    [recorder] = await lab.recorders(
        [request], "off", k=4, limits=limits, wrap=lambda _: NgramDrafter(least_survival=0.4)
    )
    assert all(delta.num_drafted == 0 for delta in recorder.deltas[:100])
    assert recorder.num_drafted > 0
    await lab.check_same([recorder], limits)


class Watched(ThreadTarget):
    """Aborts a request while its step number `at_step` is being computed."""

    abort: Callable[[], None]

    def __init__(self, worker: TargetWorker, *, at_step: int) -> None:
        super().__init__(worker)
        self._at_step = at_step

    async def step(self, step: StepInput) -> StepOutput:
        """As the other, with the abort in the middle."""
        result = asyncio.ensure_future(super().step(step))
        await asyncio.sleep(0)
        if step.step_id == self._at_step:
            self.abort()
        return await result


@pytest.mark.parametrize("at_step", [1, 2, 4, 6])
async def test_x70_a_cancel_during_a_step_leaves_nothing(lab: Lab, at_step: int) -> None:
    """In prefill or while verifying: the neighbour is Same, blocks and places are back."""
    limits = limits_of(max_num_batched_tokens=16)
    victim = Recorder(
        make_request(range(3, 33), request_id="victim", max_tokens=None, ignore_eos=True)
    )
    other = Recorder(make_request([5, 6], request_id="other", ignore_eos=True))
    with ExitStack() as stack:
        worker = lab.worker(limits)
        target = Watched(worker, at_step=at_step)
        stack.callback(target.close)
        engine = make_engine(
            target,
            lab.drafter("same", Place(worker, target, limits, stack)),
            limits=limits,
            eos_token_ids=[EOS_TOKEN_ID],
        )
        target.abort = lambda: engine.abort("victim")
        async with running(engine):
            for recorder in (victim, other):
                engine.submit(recorder.request, recorder)
            await victim.finished.wait()
            assert engine.load().step_id == at_step
            await other.finished.wait()
            load = engine.load()
    assert victim.answer().finish_reason is FinishReason.ABORT
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    await lab.check_same([other], limits)
