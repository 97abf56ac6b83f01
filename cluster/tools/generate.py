"""One answer in one process: no server, no Ray."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from cluster.config import DrafthouseConfig
from cluster.grammar.compiler import check_grammar
from cluster.local import LocalEngine, build_engine, in_passing_thread
from cluster.models.reference import load_generation_defaults, resolve
from cluster.request import Grammar, Request, SamplingParams, StoppingParams
from cluster.text.answer import Answer
from cluster.text.stream import TextDelta, TextStream, stream_text
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What to continue and how; None takes the model's own default, or a drawn seed."""

    text: str
    raw: bool = False  # the text as it is, without the chat template
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    grammar: Grammar | None = None


async def generate(
    config: DrafthouseConfig, prompt: Prompt, *, show: Callable[[TextDelta], None]
) -> Answer:
    """The whole answer; `show` gets each piece as it comes. Raises DrafthouseError."""
    folder = resolve(config.target.model)
    tokenizer = load_tokenizer(folder)
    if prompt.grammar is not None:
        check_grammar(prompt.grammar, tokenizer)
    request = _request(config, prompt, tokenizer)
    answer = Answer(num_prompt_tokens=len(request.prompt_token_ids), seed=request.sampling.seed)
    async with running_engine(config) as local:
        stream = TextStream(tokenizer.vocabulary, request.stopping)
        async for delta in stream_text(local.engine.generate(request), stream):
            answer.add(delta)
            show(delta)
    return answer


@asynccontextmanager
async def running_engine(config: DrafthouseConfig) -> AsyncIterator[LocalEngine]:
    """An engine at work in this process, ended on the way out."""
    build = partial(build_engine, config, registry=CollectorRegistry())
    local = await in_passing_thread(build)
    loop = asyncio.create_task(local.engine.run())
    try:
        yield local
    finally:
        await local.close()
        await loop


def _request(config: DrafthouseConfig, prompt: Prompt, tokenizer: Tokenizer) -> Request:
    defaults = load_generation_defaults(resolve(config.target.model))
    messages = (ChatMessage(role="user", content=prompt.text),)
    return Request(
        request_id="generate",
        prompt_token_ids=tokenizer.encode(prompt.text) if prompt.raw else tokenizer.chat(messages),
        sampling=SamplingParams(
            seed=secrets.randbits(63) if prompt.seed is None else prompt.seed,
            temperature=(
                defaults.temperature if prompt.temperature is None else prompt.temperature
            ),
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        stopping=StoppingParams(max_tokens=prompt.max_tokens),
        grammar=prompt.grammar,
    )
