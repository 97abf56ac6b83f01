"""The real model in two processes: what it says in one, greedy and seeded, but for near-ties."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.config import parse_config
from cluster.engine.engine import Engine
from cluster.local import build_engine
from cluster.models.reference import resolve
from cluster.request import Request, SamplingParams, StoppingParams
from cluster.text.tokenizer import ChatMessage, load_tokenizer
from protos import inference_pb2
from tests.cluster.harness import Served, application, ask, client, make_config

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.wire, pytest.mark.timeout(600)]

SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "spec_bench.jsonl"
MODEL = "smollm2-135m-instruct"
NUM_PROMPTS = 20
MAX_PROMPT_TOKENS = 90
NEW_TOKENS = 24
TEMPERATURES = (0.0, 0.8)
NEAR_TIE = 1e-3  # logits apart
AT_ONCE = 8
SIZES = {"model": MODEL, "max_model_len": 512, "max_num_seqs": AT_ONCE}

Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Twenty short questions, each asked greedily and with a seed."""
    if not SPEC_BENCH.exists():
        pytest.skip(f"the Spec-Bench prompts are not at {SPEC_BENCH}")
    tokenizer = load_tokenizer(resolve(MODEL))
    questions = [json.loads(line)["turns"][0] for line in SPEC_BENCH.read_text().splitlines()]
    encoded = [tokenizer.chat((ChatMessage(role="user", content=text),)) for text in questions]
    short = [token_ids for token_ids in encoded if len(token_ids) <= MAX_PROMPT_TOKENS]
    return [
        Request(
            request_id=f"{temperature}-{seed}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(seed=seed, temperature=temperature),
            stopping=StoppingParams(max_tokens=NEW_TOKENS),
        )
        for temperature in TEMPERATURES
        for seed, prompt in enumerate(short[:: len(short) // NUM_PROMPTS][:NUM_PROMPTS])
    ]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The application with the target in two processes."""
    ranks = {"tensor_parallel_size": 2, "resources": {"CPU": 0.4}, "engine_resources": {"CPU": 0.3}}
    with application(make_config(MODEL, target=SIZES | ranks)) as served:
        yield served


async def over_two_ranks(served: Served, requests: Sequence[Request]) -> list[Tokens]:
    """Their answers, so many at once."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(request: Request) -> Tokens:
        wire = inference_pb2.GenerateRequest(
            token_ids=request.prompt_token_ids,
            sampling=inference_pb2.Sampling(
                temperature=request.sampling.temperature, seed=request.sampling.seed
            ),
            stopping=inference_pb2.Stopping(max_tokens=NEW_TOKENS),
        )
        async with gate:
            said, _ = await ask(stub, wire)
            return said.token_ids

    async with client(served) as stub:
        return await asyncio.gather(*map(one, requests))


@asynccontextmanager
async def one_rank() -> AsyncIterator[Engine]:
    """An engine with the whole model in this process."""
    config = parse_config({"target": SIZES, "drafter": {"kind": "off"}})
    local = await asyncio.to_thread(build_engine, config, registry=CollectorRegistry())
    running = asyncio.create_task(local.engine.run())
    yield local.engine
    await local.close()
    await running


async def answer(engine: Engine, request: Request) -> Tokens:
    """All tokens of it."""
    return tuple([token async for delta in engine.generate(request) for token in delta.token_ids])


async def is_near_tie(engine: Engine, request: Request, mine: Tokens, theirs: Tokens) -> bool:
    """Whether, where two answers part, a nudge to the other's token makes this engine draw it."""
    pairs = list(zip(mine, theirs, strict=False))
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:  # one answer is the beginning of the other
        return False
    nudged = replace(
        request,
        output_token_ids=mine[:place],
        sampling=replace(request.sampling, logit_bias=((theirs[place], NEAR_TIE),)),
        stopping=StoppingParams(max_tokens=place + 1),
    )
    return await answer(engine, nudged) == theirs[place : place + 1]


async def test_two_ranks_draw_what_one_draws(
    served: Served, requests: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy and seeded: a token that differs was within a thousandth of a logit."""
    assert len(requests) == NUM_PROMPTS * len(TEMPERATURES)
    theirs = await over_two_ranks(served, requests)
    async with one_rank() as engine:
        mine = await asyncio.gather(*(answer(engine, request) for request in requests))
        differing = [
            (request, one, other)
            for request, one, other in zip(requests, mine, theirs, strict=True)
            if one != other
        ]
        with capsys.disabled():
            print(f"\n{len(differing)} of {len(requests)} answers part at a near-tie")  # noqa: T201
        for request, one, other in differing:
            assert await is_near_tie(engine, request, one, other), request.request_id
    assert len(differing) < len(requests) / 4
    assert await over_two_ranks(served, requests[:AT_ONCE]) == theirs[:AT_ONCE]
