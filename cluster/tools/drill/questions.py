"""What is asked of the cluster again and again, and what it must answer, bit for bit."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from cluster.config import DrafthouseConfig, parse_config
from cluster.local import build_engine, in_passing_thread
from cluster.request import Request, SamplingParams, StoppingParams

SAMPLED = 0.8  # temperature of every other question; the rest are greedy
FIRST_TOKEN, LAST_TOKEN = 3, 252  # of prompts: there in every vocabulary


@dataclass(frozen=True, slots=True)
class Question:
    """A request of a fixed length, with logprobs."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be the same however it came about."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def make_questions(count: int, *, max_tokens: int) -> tuple[Question, ...]:
    """Different prompts of different lengths, sampled and greedy ones in turn."""
    span = LAST_TOKEN - FIRST_TOKEN
    return tuple(
        Question(
            tuple((7 * number + place) % span + FIRST_TOKEN for place in range(5 + 3 * number)),
            seed=number,
            temperature=0.0 if number % 2 else SAMPLED,
            max_tokens=max_tokens,
        )
        for number in range(count)
    )


async def undisturbed(
    config: DrafthouseConfig, questions: Sequence[Question]
) -> tuple[Answer, ...]:
    """What one engine in this process says, without Ray, without drafts, on one rank."""
    data = config.model_dump(mode="json")
    data["target"] |= {"tensor_parallel_size": 1, "max_num_waiting": len(questions)}
    alone = parse_config(data | {"drafter": {"kind": "off"}})
    local = await in_passing_thread(lambda: build_engine(alone, registry=CollectorRegistry()))
    running = asyncio.create_task(local.engine.run())

    async def answer(question: Question) -> Answer:
        deltas = [delta async for delta in local.engine.generate(_request(question))]
        return Answer(
            tuple(token for delta in deltas for token in delta.token_ids),
            tuple(logprob for delta in deltas for logprob in delta.logprobs),
        )

    try:
        return tuple(await asyncio.gather(*map(answer, questions)))
    finally:
        await local.close()
        await running


def _request(question: Question) -> Request:
    return Request(
        request_id=str(question.seed),
        prompt_token_ids=question.prompt_token_ids,
        sampling=SamplingParams(seed=question.seed, temperature=question.temperature),
        stopping=StoppingParams(max_tokens=question.max_tokens, ignore_eos=True),
        logprobs=True,
    )
