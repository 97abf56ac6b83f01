"""A real, tiny model behind the socket: what comes out depends on nothing but request and seed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.config import DrafthouseConfig, parse_config
from cluster.local import build_engine
from cluster.text.tokenizer import load_tokenizer
from tests.wire import Answer, Wire, serving

pytestmark = pytest.mark.wire

PROMPTS = (
    "the same the same the same the same",
    "x",
    "A draft is a guess at what the model will say, and " * 2,
    "👍 你好",
)
Settings = dict[str, object]
NGRAM: Settings = {"kind": "ngram"}
OFF: Settings = {"kind": "off"}


def settings(folder: Path, drafter: Settings, num_speculative_tokens: int) -> DrafthouseConfig:
    return parse_config(
        {
            "name": "tiny",
            "target": {
                "model": str(folder),
                "max_model_len": 512,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 48,
                "num_threads": 1,
            },
            "drafter": drafter,
            "speculation": {"num_speculative_tokens": num_speculative_tokens},
        }
    )


@asynccontextmanager
async def up(folder: Path, drafter: Settings, num_speculative_tokens: int) -> AsyncIterator[Wire]:
    """A server of the checkpoint, computing for real in its own thread."""
    registry = CollectorRegistry()
    config = settings(folder, drafter, num_speculative_tokens)
    local = await asyncio.to_thread(build_engine, config, registry=registry)
    try:
        async with serving(
            local.engine,
            local.info,
            load_tokenizer(folder),
            target=local.target,
            engine_registry=registry,
        ) as wire:
            yield wire
    finally:
        await local.close()


async def answers(wire: Wire, temperature: float, *, together: bool = False) -> list[Answer]:
    """All prompts' answers, one after the other or all at once."""
    asked = [
        wire.ask(
            prompt=prompt,
            sampling={"temperature": temperature, "seed": 7, "top_p": 0.95},
            stopping={"max_tokens": 16},
            logprobs=True,
        )
        for prompt in PROMPTS
    ]
    if together:
        return list(await asyncio.gather(*asked))
    return [await one for one in asked]


def same(one: list[Answer], other: list[Answer]) -> bool:
    """Equal to the last bit in all that a caller gets, drafting aside."""
    return [(a.text, a.token_ids, a.logprobs, a.last.finish_reason, a.last.usage) for a in one] == [
        (a.text, a.token_ids, a.logprobs, a.last.finish_reason, a.last.usage) for a in other
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_x22_same_answers_whatever_drafts(
    checkpoints: dict[str, Path], temperature: float
) -> None:
    """Off, n-gram, the target's own weights and unrelated ones; alone and in company; any K."""
    folder = checkpoints["target"]
    async with up(folder, OFF, 4) as wire:
        expected = await answers(wire, temperature)
        assert same(await answers(wire, temperature, together=True), expected)
        assert expected[0].last.speculation.drafted == 0
    model = {"kind": "model", "placement": "in_process", "max_model_len": 512, "num_threads": 1}
    own, unrelated = (model | {"model": str(checkpoints[name])} for name in ("target", "random"))
    for drafter, num_speculative_tokens in ((NGRAM, 1), (NGRAM, 5), (own, 4), (unrelated, 2)):
        async with up(folder, drafter, num_speculative_tokens) as wire:
            found = await answers(wire, temperature, together=True)
            assert same(found, expected), drafter
            drafted = sum(answer.last.speculation.drafted for answer in found)
            accepted = sum(answer.last.speculation.accepted for answer in found)
            if drafter is own:
                assert accepted > 0.9 * drafted > 0
            elif drafter is unrelated:
                assert drafted > 0


async def test_x20_the_seed_decides(checkpoints: dict[str, Path]) -> None:
    """Seed 7 twice and after a restart gives one answer, seed 8 another."""
    found = []
    for seeds in ((7, 7, 8), (7,)):
        async with up(checkpoints["target"], NGRAM, 4) as wire:
            for seed in seeds:
                sampling = {"temperature": 1.0, "seed": seed}
                answer = await wire.ask(prompt="x", sampling=sampling, stopping={"max_tokens": 16})
                assert answer.last.seed == seed
                found.append(answer.token_ids)
    assert found[0] == found[1] == found[3] != found[2]


async def test_the_drawn_seed_repeats_the_answer(checkpoints: dict[str, Path]) -> None:
    """The seed that the last message tells gives the very answer it came with."""
    async with up(checkpoints["target"], NGRAM, 4) as wire:
        stopping = {"max_tokens": 16}
        first = await wire.ask(prompt="x", stopping=stopping, logprobs=True)
        again = await wire.ask(
            prompt="x", stopping=stopping, logprobs=True, sampling={"seed": first.last.seed}
        )
    assert same([first], [again])
