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
NUM_GENERATED = 4  # of the prompts, by transformers' own loop
NUM_ALONE = 8  # of the prompts, one at a time
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Answer:
    """What came over the wire for one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: int
    num_accepted: int


@dataclass(frozen=True)
class Run:
    """The first prompts asked, so many at once."""

    concurrency: int
    speculate: bool
    num_prompts: int = NUM_PROMPTS


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
def ngram_runs(prompts: list[tuple[int, ...]]) -> list[list[Answer]]:
    """By one server with an n-gram drafter: plain, then with drafts, alone and among others."""
    runs = [
        Run(1, speculate=False),
        Run(1, speculate=True, num_prompts=NUM_ALONE),
        Run(8, speculate=True),
        Run(8, speculate=False),
    ]
    return asyncio.run(_ask("ngram", prompts, runs))


@pytest.fixture(scope="module")
def plain(ngram_runs: list[list[Answer]]) -> list[Answer]:
    """The answers one at a time with speculation off: what all others must equal."""
    return ngram_runs[0]


async def _ask(
    draft: str, prompts: Sequence[Sequence[int]], runs: Sequence[Run]
) -> list[list[Answer]]:
    """Serve with a drafter, then ask for each run.

    With a fixed K: whether drafts pay on this machine is no matter here.
    """
    async with (
        served({}, draft, num_speculative_tokens=4) as address,
        aio.insecure_channel(address.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        return [await _all(stub, prompts[: run.num_prompts], run) for run in runs]


async def _all(
    stub: inference_pb2_grpc.InferenceStub, prompts: Sequence[Sequence[int]], run: Run
) -> list[Answer]:
    gate = asyncio.Semaphore(run.concurrency)

    async def one(token_ids: Sequence[int]) -> Answer:
        async with gate:
            return await _answer(stub, token_ids, speculate=run.speculate)

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
    """`expected` may hold more: those of prompts that were not asked."""
    for number, (answer, plain_answer) in enumerate(zip(answers, expected, strict=False)):
        assert answer.token_ids == plain_answer.token_ids, f"prompt {number}"
        assert answer.logprobs == plain_answer.logprobs, f"prompt {number}"
        assert answer.finish_reason == plain_answer.finish_reason, f"prompt {number}"


def test_greedy_tokens_are_those_of_transformers(
    prompts: list[tuple[int, ...]], reference_model: PreTrainedModel, plain: list[Answer]
) -> None:
    """Every token is the one transformers finds most probable after those before it.

    Where it is not, the two were a near-tie.
    """
    assert len(prompts) == NUM_PROMPTS
    for prompt, answer in zip(prompts, plain, strict=True):
        with torch.inference_mode():
            logits = reference_model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
        for place, token_id in enumerate(answer.token_ids, len(prompt) - 1):
            values, token_ids = logits[place].topk(2)
            if token_ids[0] != token_id:
                assert token_ids[1] == token_id, f"position {place + 1}"
                assert float(values[0] - values[1]) < NEAR_TIE, f"position {place + 1}"


def test_greedy_answers_are_those_of_transformers_own_loop(
    prompts: list[tuple[int, ...]], reference_model: PreTrainedModel, plain: list[Answer]
) -> None:
    """`generate` ends where the answer ends and says the same, up to near-ties."""
    for prompt, answer in list(zip(prompts, plain, strict=True))[:NUM_GENERATED]:
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
    ngram_runs: list[list[Answer]], plain: list[Answer]
) -> None:
    """Token ids and logprobs are equal with n-gram drafts and without, one or eight at once."""
    _, alone, together, together_plain = ngram_runs
    assert [len(answers) for answers in ngram_runs[1:]] == [NUM_ALONE, NUM_PROMPTS, NUM_PROMPTS]
    for answers in (alone, together, together_plain):
        _same(answers, plain)
    assert sum(answer.num_accepted for answer in alone) > 0
    assert sum(answer.num_accepted for answer in together_plain) == 0


def test_every_bit_is_the_same_with_a_draft_worker(
    prompts: list[tuple[int, ...]], plain: list[Answer], tmp_path: Path
) -> None:
    """Token ids and logprobs are equal with drafts of a model in another process."""
    keep = [layer for layer in range(30) if layer % 6 != 3]
    draft = drop_layers(resolve("smollm2-135m-instruct"), keep, tmp_path / "draft")
    runs = [Run(1, speculate=True, num_prompts=NUM_ALONE), Run(8, speculate=True)]
    alone, together = asyncio.run(_ask(str(draft), prompts, runs))
    assert (len(alone), len(together)) == (NUM_ALONE, NUM_PROMPTS)
    for answers in (alone, together):
        _same(answers, plain)
        assert sum(answer.num_accepted for answer in answers) > 0
