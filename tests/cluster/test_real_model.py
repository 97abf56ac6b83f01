"""The real model through the real command: what transformers says, token for token."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from grpc import aio
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.models.reference import resolve
from cluster.text.tokenizer import ChatMessage, load_tokenizer
from cluster.tools.bench.served import served
from protos import inference_pb2, inference_pb2_grpc
from tests.layer_dropped import drop_layers

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.wire, pytest.mark.timeout(900)]

SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "spec_bench.jsonl"
NUM_PROMPTS = 20
MAX_PROMPT_TOKENS = 400
NEW_TOKENS = 48
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Answer:
    """What came over the wire for one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: int
    num_accepted: int


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Twenty Spec-Bench questions of moderate length, spread over all categories."""
    if not SPEC_BENCH.exists():
        pytest.skip(f"the Spec-Bench prompts are not at {SPEC_BENCH}")
    tokenizer = load_tokenizer(resolve("smollm2-135m-instruct"))
    questions = [json.loads(line)["turns"][0] for line in SPEC_BENCH.read_text().splitlines()]
    encoded = [tokenizer.chat((ChatMessage(role="user", content=text),)) for text in questions]
    moderate = [token_ids for token_ids in encoded if len(token_ids) <= MAX_PROMPT_TOKENS]
    return moderate[:: len(moderate) // NUM_PROMPTS][:NUM_PROMPTS]


@pytest.fixture(scope="module")
def reference_model() -> PreTrainedModel:
    """Transformers' own model on the same float32 weights."""
    return AutoModelForCausalLM.from_pretrained(
        resolve("smollm2-135m-instruct"), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def plain(prompts: list[tuple[int, ...]]) -> list[Answer]:
    """The answers one at a time with speculation off: what all others must equal."""
    return asyncio.run(_ask("ngram", prompts, [(1, False)]))[0]


async def _ask(
    draft: str, prompts: Sequence[Sequence[int]], runs: Sequence[tuple[int, bool]]
) -> list[list[Answer]]:
    """Serve with a drafter, then ask everything once for each (concurrency, speculation)."""
    async with (
        served("smollm2-135m-instruct", draft) as address,
        aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        return [
            await _all(stub, prompts, concurrency=concurrency, speculate=speculate)
            for concurrency, speculate in runs
        ]


async def _all(
    stub: inference_pb2_grpc.InferenceStub,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    speculate: bool,
) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)

    async def one(token_ids: Sequence[int]) -> Answer:
        async with gate:
            return await _answer(stub, token_ids, speculate=speculate)

    return await asyncio.gather(*map(one, prompts))


async def _answer(
    stub: inference_pb2_grpc.InferenceStub, token_ids: Sequence[int], *, speculate: bool
) -> Answer:
    request = inference_pb2.GenerateRequest(
        token_ids=token_ids,
        sampling=inference_pb2.Sampling(temperature=0.0),
        stopping=inference_pb2.Stopping(max_tokens=NEW_TOKENS),
        speculation=inference_pb2.Speculation(enabled=speculate),
        logprobs=True,
    )
    chunks = [chunk async for chunk in stub.GenerateStream(request)]
    return Answer(
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        finish_reason=chunks[-1].finish_reason,
        num_accepted=chunks[-1].speculation.accepted,
    )


def _same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for number, (answer, plain_answer) in enumerate(zip(answers, expected, strict=True)):
        assert answer.token_ids == plain_answer.token_ids, f"prompt {number}"
        assert answer.logprobs == plain_answer.logprobs, f"prompt {number}"
        assert answer.finish_reason == plain_answer.finish_reason, f"prompt {number}"


def test_greedy_tokens_are_those_of_transformers(
    prompts: list[tuple[int, ...]], reference_model: PreTrainedModel, plain: list[Answer]
) -> None:
    """Where a token differs from transformers' greedy choice, the two were a near-tie."""
    assert len(prompts) == NUM_PROMPTS
    for prompt, answer in zip(prompts, plain, strict=True):
        with torch.inference_mode():
            output = reference_model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
            )
        expected = tuple(output[0, len(prompt) :].tolist())
        if answer.token_ids != expected:
            _assert_near_tie(reference_model, prompt, answer.token_ids, expected)


def _assert_near_tie(
    model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> None:
    pairs = list(zip(ours, theirs, strict=False))
    place = next(place for place, (mine, other) in enumerate(pairs) if mine != other)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *theirs[:place]]])).logits[0, -1]
    top = torch.topk(logits, 2)
    assert set(top.indices.tolist()) == {ours[place], theirs[place]}
    assert float(top.values[0] - top.values[1]) < NEAR_TIE


def test_every_bit_is_the_same_with_ngram_drafts(
    prompts: list[tuple[int, ...]], plain: list[Answer]
) -> None:
    """Token ids and logprobs are equal with n-gram drafts and without, one or eight at once."""
    runs = asyncio.run(_ask("ngram", prompts, [(1, True), (8, True), (8, False)]))
    for answers in runs:
        _same(answers, plain)
    assert sum(answer.num_accepted for answer in runs[0]) > 0
    assert sum(answer.num_accepted for answer in runs[2]) == 0


def test_every_bit_is_the_same_with_a_draft_worker(
    prompts: list[tuple[int, ...]], plain: list[Answer], tmp_path: Path
) -> None:
    """Token ids and logprobs are equal with drafts of a model in another process."""
    keep = [layer for layer in range(30) if layer % 6 != 3]
    draft = drop_layers(resolve("smollm2-135m-instruct"), keep, tmp_path / "draft")
    runs = asyncio.run(_ask(str(draft), prompts, [(1, True), (8, True)]))
    for answers in runs:
        _same(answers, plain)
        assert sum(answer.num_accepted for answer in answers) > 0
