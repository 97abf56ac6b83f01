"""Conformance of drafters beside the target, on a tiny random llama: heads, and layers skipped.

Random heads are mostly wrong, which is when rows of rejected drafts could be taken for settled
ones. Those that must be right are in `test_engine_sure_heads`.
"""

import random
from dataclasses import replace

import pytest

from cluster.config import SkipDrafterConfig
from cluster.messages import Rule
from cluster.models.load import load_decoder
from cluster.request import FinishReason, Request, SamplingParams
from cluster.text.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.conformance.head_lab import HeadLab
from tests.conformance.inputs import (
    FIELDS,
    SAMPLED,
    K,
    fifty_requests,
    limits_of,
    scored_requests,
    wide_limits,
)
from tests.conformance.lab import VOCAB_SIZE
from tests.grammar.sources import PERSON, check_person, json_schema
from tests.harness import GREEDY, make_request
from tests.heads import make_eagle, make_eagle3, make_medusa

every_kind = pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3", "skip"])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> HeadLab:
    """A random target with a head of every kind and layout."""
    del one_thread
    folder = tmp_path_factory.mktemp("heads")
    target = make_checkpoint(
        folder / "target", seed=1, hidden_size=32, num_layers=5, max_position_embeddings=2304
    )
    heads = {
        "medusa": make_medusa(folder / "medusa", target, num_heads=4),
        "eagle": make_eagle(folder / "eagle", target),
        "eagle3": make_eagle3(folder / "eagle3", target, layout="speculators"),
    }
    skipped = SkipDrafterConfig(skip_layers=(2,), skip_attention=(0,))
    decoders = {"target": load_decoder(target, dtype="float32")}
    return HeadLab(decoders, target, skipped=skipped, heads=heads)


def requests(sampling: SamplingParams, max_tokens: int, *, number: int = 9) -> list[Request]:
    """A word repeated, a single token, a prompt of 600 tokens, and others."""
    rng = random.Random(1)
    long = rng.choices(range(3, VOCAB_SIZE), k=600)
    prompts = [[5, 6, 7] * 48, [3], long]
    prompts += [rng.choices(range(3, VOCAB_SIZE), k=rng.randint(2, 60)) for _ in range(number - 3)]
    return [
        make_request(prompt, request_id=str(index), sampling=sampling, max_tokens=max_tokens)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", K)
@every_kind
async def test_x01_every_head_and_k_give_the_plain_answer(
    lab: HeadLab, name: str, k: int, sampling: SamplingParams
) -> None:
    """T = 0 and 0.8: tokens, logprob bits, finish reason and usage as without speculation."""
    limits = wide_limits()
    recorders = await lab.recorders(requests(sampling, 10), name, k=k, limits=limits)
    await lab.check_same(recorders, limits)
    drafted = sum(recorder.num_drafted for recorder in recorders)
    assert drafted > 0
    assert sum(recorder.num_accepted for recorder in recorders) < drafted


@pytest.mark.parametrize("k", [1, 5])
@every_kind
async def test_x01_fifty_prompts(lab: HeadLab, name: str, k: int) -> None:
    """T = 0, one of them of 2,000 tokens: Same."""
    limits = wide_limits()
    recorders = await lab.recorders(fifty_requests(), name, k=k, limits=limits)
    await lab.check_same(recorders, limits)
    assert sum(recorder.num_drafted for recorder in recorders) > 0


async def test_x01_all_beside_each_other(lab: HeadLab) -> None:
    """A choice of all of them: each on its own part of what the same steps leave behind."""
    limits = wide_limits()
    recorders = await lab.recorders(requests(GREEDY, 30), "all", k=5, limits=limits)
    await lab.check_same(recorders, limits)


@pytest.mark.parametrize(("concurrency", "number"), [(1, 6), (32, 40)])
@every_kind
async def test_x07_neighbours_change_nothing(
    lab: HeadLab, name: str, concurrency: int, number: int
) -> None:
    """Sampled requests arriving at random times, one at a time and 32: Same."""
    recorders = await lab.recorders(
        requests(SAMPLED, 12, number=number),
        name,
        k=4,
        limits=wide_limits(concurrency),
        concurrency=concurrency,
    )
    await lab.check_same(recorders, wide_limits())


@every_kind
async def test_x08_a_tight_budget_and_lost_rounds_change_nothing(lab: HeadLab, name: str) -> None:
    """Budget 5 for eight sequences, and blocks so few that decodes are put back: Same."""
    tight = limits_of(max_model_len=96, max_num_batched_tokens=5, block_size=4, num_blocks=40)
    asked = [
        make_request([5, 6, 7 + i] * 3, request_id=str(i), sampling=SAMPLED, max_tokens=30)
        for i in range(8)
    ]
    recorders = await lab.recorders(asked, name, k=4, limits=tight)
    await lab.check_same(recorders, limits_of(max_model_len=96))


@every_kind
async def test_x40_to_x42_every_field_is_the_same_with_drafts(lab: HeadLab, name: str) -> None:
    """Penalties, biases, allowed ids, min-p and plain greedy beside each other: Same.

    With five top logprobs at every token, of which the emitted one is the first where nothing
    stands between it and the model.
    """
    limits = limits_of(max_num_batched_tokens=48)
    asked = scored_requests(GREEDY, name="greedy")
    for field, sampling in FIELDS.items():
        asked += scored_requests(sampling, name=field, max_tokens=16)
    recorders = await lab.recorders(asked, name, k=5, limits=limits)
    await lab.check_same(recorders, limits)
    assert all(recorder.num_drafted > 0 for recorder in recorders)
    for recorder in recorders[:4]:
        answer = recorder.answer()
        tops = [top for delta in recorder.deltas for top in delta.top_logprobs]
        assert [top[0] for top in tops] == [*zip(answer.token_ids, answer.logprobs, strict=True)]


@every_kind
async def test_x43_every_answer_is_in_its_grammar(lab: HeadLab, name: str) -> None:
    """Drafts that break a JSON schema: all answers are valid, and Same."""
    assert lab.folder is not None
    tokenizer = load_tokenizer(lab.folder)
    limits = limits_of(max_model_len=512)
    asked = [
        replace(
            make_request(
                [5, 6, 7 + i],
                request_id=str(i),
                sampling=replace(SAMPLED, seed=i, temperature=0.4 * i),
                max_tokens=None,
            ),
            grammar=json_schema(PERSON),
        )
        for i in range(4)
    ]
    recorders = await lab.recorders(asked, name, k=3, limits=limits)
    await lab.check_same(recorders, limits)
    for recorder in recorders:
        assert recorder.num_drafted > 0
        assert recorder.answer().finish_reason is FinishReason.STOP
        check_person(tokenizer.decode(recorder.answer().token_ids))


@every_kind
async def test_the_ratio_rule_takes_their_distributions(lab: HeadLab, name: str) -> None:
    """Greedy requests are Same under it; sampled ones end, with drafts that were believed."""
    limits = limits_of()
    greedy = await lab.recorders(
        requests(GREEDY, 10, number=8)[3:], name, k=4, limits=limits, rule=Rule.RATIO
    )
    await lab.check_same(greedy, limits)
    sampled = await lab.recorders(
        requests(SAMPLED, 20, number=8)[3:], name, k=4, limits=limits, rule=Rule.RATIO
    )
    assert sum(recorder.num_drafted for recorder in sampled) > 0
