"""A real, tiny model behind the socket: what comes out depends on nothing but request and seed."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.config import DrafthouseConfig, parse_config
from cluster.local import build_engine
from cluster.request import answer_seed
from cluster.text.tokenizer import load_tokenizer
from protos import inference_pb2
from tests.harness import series
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
            "speculation": {
                "policy": "fixed",
                "num_speculative_tokens": num_speculative_tokens,
            },
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
    """Equal to the last bit in all that a caller gets, drafting and what was cached aside."""

    def what(answer: Answer) -> tuple[object, ...]:
        usage = answer.last.usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        reason = answer.last.finish_reason
        return answer.text, answer.token_ids, answer.logprobs, reason, counts

    return list(map(what, one)) == list(map(what, other))


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


BUSY: Settings = {
    "temperature": 0.9,
    "seed": 11,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -2.0,
    "logit_bias": {40: 3.0, 50: -100.0},
    "banned_token_ids": [60, 61],
    "banned_words": ["the", "zq"],
    "num_answers": 3,
}


async def busy_answers(wire: Wire) -> list[list[Answer]]:
    """Every prompt with nearly every field at once."""
    asked = [
        wire.ask_several(
            prompt=prompt,
            sampling=BUSY,
            stopping={"max_tokens": 24, "min_tokens": 20},
            top_logprobs=5,
            prompt_logprobs=True,
        )
        for prompt in PROMPTS
    ]
    return list(await asyncio.gather(*asked))


def told(answers: list[Answer]) -> list[object]:
    """All that must be the same whatever drafts, to the last bit."""
    return [
        (
            answer.text,
            answer.token_ids,
            answer.logprobs,
            [position for chunk in answer.chunks for position in chunk.top_logprobs],
            [logprob for chunk in answer.chunks for logprob in chunk.prompt_logprobs],
            (answer.last.finish_reason, answer.last.seed),
        )
        for answer in answers
    ]


async def test_x40_x41_x42_every_field_whatever_drafts(checkpoints: dict[str, Path]) -> None:
    """Penalties, bias, bans, min_tokens, scores and several answers: the same with drafts."""
    folder = checkpoints["target"]
    tokenizer = load_tokenizer(folder)
    async with up(folder, OFF, 4) as wire:
        expected = [told(answers) for answers in await busy_answers(wire)]
        single = await wire.ask(
            prompt=PROMPTS[0],
            sampling=BUSY | {"num_answers": 1, "seed": answer_seed(11, 2)},
            stopping={"max_tokens": 24, "min_tokens": 20},
            top_logprobs=5,
        )
        assert single.token_ids == expected[0][2][1]  # type: ignore[index]
    model = {"kind": "model", "placement": "in_process", "max_model_len": 512, "num_threads": 1}
    own = model | {"model": str(folder)}
    for drafter in (NGRAM, own):
        async with up(folder, drafter, 5) as wire:
            found = await busy_answers(wire)
            assert [told(answers) for answers in found] == expected, drafter
    for prompt, answers in zip(PROMPTS, found, strict=True):
        first = answers[0].chunks[0]
        assert len(first.prompt_logprobs) == len(tokenizer.encode(prompt)) - 1
        for answer in answers:
            assert 20 <= len(answer.token_ids) <= 24
            assert not {50, 60, 61} & set(answer.token_ids)
            for word in (word for form in ("the", "zq") for word in tokenizer.word(form)):
                runs = zip(*(answer.token_ids[n:] for n in range(len(word))), strict=False)
                assert word not in set(runs)
            for chunk in answer.chunks:
                for token_id, logprob, top in zip(
                    chunk.token_ids, chunk.logprobs, chunk.top_logprobs, strict=True
                ):
                    assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
                    assert logprob <= top.logprobs[0] < 0
                    best = dict(zip(top.token_ids, top.logprobs, strict=True))
                    assert best.get(token_id, logprob) == logprob


async def test_x56_a_prompt_that_was_there_before_is_cached(checkpoints: dict[str, Path]) -> None:
    """The usage says so, with speculation and without, and nothing else in the answer does."""
    prompt = "A draft is a guess at what the model will say, and " * 6
    usages = []
    for drafter in (OFF, NGRAM):
        async with up(checkpoints["target"], drafter, 4) as wire:
            fields = {"prompt": prompt, "sampling": {"seed": 3}, "stopping": {"max_tokens": 8}}
            cold, warm = [await wire.ask(**fields, logprobs=True) for _ in range(2)]
            assert told([cold]) == told([warm])
            usages.append((cold.last.usage.cached_tokens, warm.last.usage.cached_tokens))
    assert usages[0] == usages[1]
    assert usages[0][0] == 0 < usages[0][1] < cold.last.usage.prompt_tokens


SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["x", "yy", "zé"]}, "when": {"type": "boolean"}},
    "required": ["who", "when"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("drafter", [NGRAM, "random"])
async def test_x43_structured_answers_all_fit(
    checkpoints: dict[str, Path], drafter: Settings | str
) -> None:
    """32 answers by a schema beside 4 by an expression, with drafts that break both."""
    if drafter == "random":
        path = str(checkpoints["random"])
        drafter = {"kind": "model", "placement": "in_process", "model": path, "num_threads": 1}
    assert isinstance(drafter, dict)
    stopping = {"max_tokens": 120}
    async with up(checkpoints["target"], drafter, 3) as wire:
        asked = [
            wire.ask_several(
                prompt=prompt,
                sampling={"seed": seed, "num_answers": 8},
                grammar={"json_schema": json.dumps(SCHEMA)},
                stopping=stopping,
            )
            for seed, prompt in enumerate(PROMPTS)
        ] + [
            wire.ask_several(
                prompt="x",
                sampling={"num_answers": 4},
                grammar={"regex": "[ab]{3}-[0-9]{2}"},
                stopping=stopping,
            )
        ]
        *by_schema, by_regex = await asyncio.gather(*asked)
        counted = series(wire.engine_registry)
    drafted = counted["drafthouse_spec_decode_num_draft_tokens_total"]
    assert counted["drafthouse_spec_decode_num_accepted_tokens_total"] < drafted
    answers = [answer for several in by_schema for answer in several]
    assert len(answers) == 32
    for answer in answers:
        assert answer.last.finish_reason == inference_pb2.FINISH_REASON_STOP
        found = json.loads(answer.text)
        assert found.keys() == {"who", "when"}
        assert found["who"] in ("x", "yy", "zé")
        assert isinstance(found["when"], bool)
    assert len({answer.text for answer in answers}) > 1
    assert all(re.fullmatch("[ab]{3}-[0-9]{2}", answer.text) for answer in by_regex)
