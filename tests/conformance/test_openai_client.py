"""The real `openai` client, and curl, against a real socket and a tiny model that computes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry

from cluster.config import parse_config
from cluster.local import build_engine
from cluster.text.tokenizer import ChatMessage, load_tokenizer
from deployments.auth import Authenticator
from tests.checkpoints import make_checkpoint
from tests.openai_http import app_of, listening, with_template
from tests.wire import Wire, serving, until

pytestmark = pytest.mark.wire

MODEL = "tiny"
TURNS: Any = [{"role": "user", "content": "Say something about the draft."}]
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "warm": {"type": "boolean"}},
    "required": ["colour", "warm"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "paint", "description": "Paint it.", "parameters": COLOUR},
    },
    {"type": "function", "function": {"name": "look"}},
]
SAMPLED: Any = {"temperature": 0.8, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template that takes tools."""
    return with_template(make_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@asynccontextmanager
async def up(folder: Path) -> AsyncIterator[tuple[Wire, openai.AsyncOpenAI, str]]:
    """One engine behind gRPC and HTTP; a client of the latter and its address."""
    registry = CollectorRegistry()
    config = parse_config(
        {
            "name": MODEL,
            "target": {"model": str(folder), "max_model_len": 1024, "num_threads": 1},
            "speculation": {"policy": "fixed", "num_speculative_tokens": 4},
        }
    )
    local = await asyncio.to_thread(build_engine, config, registry=registry)
    tokenizer = load_tokenizer(folder)
    try:
        async with serving(
            local.engine, local.info, tokenizer, target=local.target, engine_registry=registry
        ) as wire:
            app = app_of(wire, tokenizer, CollectorRegistry(), Authenticator())
            async with listening(app) as address:
                client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
                async with client:
                    yield wire, client, address
    finally:
        await local.close()


async def test_chat_and_its_stream_are_grpcs_answer(folder: Path) -> None:
    """Same seed: same text, tokens, logprobs to the last bit and usage, whole, streamed or gRPC."""
    options: Any = {**SAMPLED, "model": MODEL, "messages": TURNS}
    extra = {"return_token_ids": True}
    async with up(folder) as (wire, client, _):
        grpc = await wire.ask(
            messages=TURNS,
            sampling={"temperature": 0.8, "seed": 7},
            stopping={"max_tokens": 24},
            top_logprobs=3,
        )
        whole = await client.chat.completions.create(
            **options, logprobs=True, top_logprobs=3, extra_body=extra
        )
        stream = await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        chunks = [chunk async for chunk in stream]
    [choice] = whole.choices
    assert choice.message.content == grpc.text
    assert choice.to_dict()["token_ids"] == grpc.token_ids
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert [entry.logprob for entry in content] == grpc.logprobs
    best = [top for chunk in grpc.chunks for top in chunk.top_logprobs]
    assert [[other.logprob for other in entry.top_logprobs] for entry in content] == [
        list(top.logprobs) for top in best
    ]
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == grpc.text
    streamed = [token for part in parts for token in part.choices[0].to_dict()["token_ids"]]  # type: ignore[attr-defined]
    assert streamed == grpc.token_ids
    for usage in (whole.usage, last.usage):
        assert usage is not None
        assert usage.completion_tokens == len(grpc.token_ids) == 24
        assert usage.prompt_tokens == grpc.last.usage.prompt_tokens
        assert usage.prompt_tokens_details is not None
    assert last.to_dict()["speculation"] == whole.to_dict()["speculation"]


async def test_speculation_changes_nothing_but_the_steps(folder: Path) -> None:
    """Switched off by the caller: the same text, and nothing was drafted."""
    text = "the same " * 12
    async with up(folder) as (_, client, _):
        answers = [
            await client.completions.create(
                model=MODEL,
                prompt=text,
                **SAMPLED,
                logprobs=2,
                extra_body={"speculation": {"enabled": enabled}, "ignore_eos": True},
            )
            for enabled in (True, False)
        ]
    on, off = (answer.to_dict() for answer in answers)
    for answer in (on, off):
        del answer["id"], answer["created"]
    plain = off.pop("speculation")
    assert plain == {"steps": 24, "drafted": 0, "accepted": 0}
    assert on.pop("speculation") != plain
    assert on["choices"] == off["choices"]


async def test_completions_and_models(folder: Path) -> None:
    """The older API with its logprobs and echo, and the list of what is served."""
    async with up(folder) as (_, client, _):
        answer = await client.completions.create(
            model=MODEL, prompt="A draft", echo=True, logprobs=0, **SAMPLED
        )
        several = await client.completions.create(model=MODEL, prompt="A draft", n=3, **SAMPLED)
        stream = await client.completions.create(
            model=MODEL, prompt="A draft", stream=True, **SAMPLED
        )
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
        models = [model.id async for model in client.models.list()]
        model = await client.models.retrieve(MODEL)
    [choice] = answer.choices
    assert choice.text == f"A draft{streamed}"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset is not None
    assert len(choice.logprobs.text_offset) == len(choice.logprobs.token_logprobs)
    assert len({choice.text for choice in several.choices}) > 1
    assert (models, model.id) == ([MODEL], MODEL)


async def test_json_by_a_schema(folder: Path) -> None:
    """A random model says what the schema allows, and nothing else."""
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": COLOUR, "strict": True},
    }
    async with up(folder) as (_, client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=TURNS, response_format=schema, n=4, temperature=1, seed=1
        )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        said = json.loads(choice.message.content or "")
        assert said.keys() == {"colour", "warm"}
        assert said["colour"] in {"red", "green"}


async def test_tool_calls_that_are_asked_for(folder: Path) -> None:
    """Required, or of one name: a random model makes valid calls, whole and streamed."""
    named: Any = {"type": "function", "function": {"name": "paint"}}
    options: Any = {"model": MODEL, "messages": TURNS, "tools": TOOLS, "temperature": 1}
    async with up(folder) as (_, client, _):
        for seed in range(3):
            answer = await client.chat.completions.create(**options, tool_choice=named, seed=seed)
            [call] = answer.choices[0].message.tool_calls or []
            check_call(call)
            assert call.function.name == "paint"
            assert answer.choices[0].finish_reason == "tool_calls"
            one: Any = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            answer = await client.chat.completions.create(**options, **one)
            [call] = answer.choices[0].message.tool_calls or []
            check_call(call)
            async with client.chat.completions.stream(**options, **one) as stream:
                final = await stream.get_final_completion()
            [streamed] = final.choices[0].message.tool_calls or []
            assert streamed.function.name == call.function.name
            assert streamed.function.arguments == call.function.arguments
        answer = await client.chat.completions.create(**options, tool_choice="none", max_tokens=8)
        assert answer.choices[0].message.tool_calls is None


def check_call(call: Any) -> None:  # noqa: ANN401 - one of many kinds of the client's
    """Its arguments are what the function takes."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "look":
        assert arguments == {}
    else:
        assert arguments.keys() == {"colour", "warm"}
        assert arguments["colour"] in {"red", "green"}


async def test_errors_are_the_clients_own(folder: Path) -> None:
    """By their status, with the field that is wrong."""
    async with up(folder) as (_, client, _):
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=MODEL, messages=TURNS, temperature=-1)
        assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(
                model=MODEL, messages=TURNS, stream=True, reasoning_effort="high"
            )
        assert wrong.value.param == "reasoning_effort"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4", messages=TURNS)
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model=MODEL, prompt="a" * 2**19)
        assert large.value.status_code == 413


async def test_x70_a_client_that_goes_ends_its_request(folder: Path) -> None:
    """A stream that is closed, a whole answer given up: nothing runs a moment later."""
    options: Any = {"model": MODEL, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    async with up(folder) as (wire, client, _):
        load = wire.backend.engine.load
        stream = await client.chat.completions.create(messages=TURNS, stream=True, **options)
        await anext(aiter(stream))
        assert load().running == 1
        await stream.close()
        await until(lambda: load().running == 0)
        waiting = asyncio.create_task(client.completions.create(prompt="a", **options))
        await until(lambda: load().running == 1)
        waiting.cancel()
        await until(lambda: load().running == 0)


async def test_curl(folder: Path) -> None:
    """A body from the command line, streamed as it comes."""
    body = {"messages": TURNS, "stream": True, "max_tokens": 5, "seed": 1}
    async with up(folder) as (wire, _, address):
        curl = await asyncio.create_subprocess_exec(
            "curl",
            "--silent",
            "--no-buffer",
            f"{address}/v1/chat/completions",
            "--json",
            json.dumps(body),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await curl.communicate()
        grpc = await wire.ask(messages=TURNS, sampling={"seed": 1}, stopping={"max_tokens": 5})
    lines = [line for line in out.decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert "".join(part["delta"].get("content", "") for part in parts) == grpc.text


def test_the_prompt_has_the_tools(folder: Path) -> None:
    """The model of these tests is told of its tools, as real ones are."""
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer.decode(tokenizer.chat([ChatMessage("user", "a")], TOOLS))
    assert "Paint it." in prompt
