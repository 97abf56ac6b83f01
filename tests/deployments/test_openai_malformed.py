"""Over a thousand wrong bodies on a real socket: a typed error each, and the server goes on."""

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from prometheus_client import CollectorRegistry
from pydantic.json_schema import models_json_schema
from schemathesis import Case, GenerationMode

from cluster.text.tokenizer import Tokenizer
from deployments.auth import Authenticator
from deployments.openai_schemas import ChatRequest, CompletionRequest
from tests.openai_http import AnyPrompt, Http, app_of, listening, tokenizer_with_tools
from tests.wire import served

pytestmark = pytest.mark.wire

PATHS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
NUM_MUTATED = 1200
NUM_MALFORMED = 1000  # of them, at least: some are still right, or right by chance
PATIENCE_SECONDS = 60.0
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1e999, 2**64, -(2**70), "", "\0", "x" * 5000, "\ud800", "auto", "text",
    [], [[]], [None], {}, {"type": "text"}, {"type": "json_schema"}, {"type": "object"}, {"": {}},
    {"$ref": "#"}, {"role": "user"}, ["a"] * 40, [0] * 2000, {"a": {"b": {"c": [{}]}}},
)  # fmt: skip
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "model": "tiny model",
            "messages": [
                {"role": "system", "content": "Be."},
                {"role": "user", "content": [{"type": "text", "text": "hé"}]},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"type": "number", "maximum": 3}},
                            "required": ["a"],
                        },
                    },
                }
            ],
            "tool_choice": "required",
            "max_tokens": 3,
            "stop": ["x", "yz"],
            "logit_bias": {"7": 1.0},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "strict": True,
                    "schema": {"type": "object", "properties": {"a": {"enum": [1, "b"]}}},
                },
            },
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "max_completion_tokens": 2,
            "seed": 3,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": [5, 6],
            "echo": True,
            "logprobs": 0,
            "temperature": 0.5,
            "top_k": 4,
            "min_tokens": 1,
            "max_tokens": 4,
            "bad_words": ["no"],
            "allowed_token_ids": [5, 6, 7],
            "speculation": {"enabled": True, "max_tokens": 2},
        },
    ),
)


class Hammer:
    """Sends bodies from code that is not asynchronous, and looks at what comes back."""

    def __init__(self, runner: asyncio.Runner, it: Http) -> None:
        self.runner = runner
        self.it = it
        self.statuses: Counter[int] = Counter()

    def send(self, path: str, body: bytes) -> None:
        """The answer is one, or an error that says what is wrong and nothing of our insides."""
        kind = {"Content-Type": "application/json"}
        answer = self.runner.run(self.it.client.post(path, content=body, headers=kind))
        self.statuses[answer.status_code] += 1
        assert "Traceback" not in answer.text
        assert ".py" not in answer.text
        if answer.status_code != httpx.codes.OK:
            check_error(answer)

    def check(self) -> None:
        """The server still answers as it did."""
        answer = self.runner.run(self.it.chat())
        assert answer["choices"][0]["message"]["content"] == "fine"


def check_error(answer: httpx.Response) -> None:
    """OpenAI's shape, the caller's fault, and a message of bounded length."""
    assert answer.status_code in {400, 404, 413}, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] in {
        "invalid_value",
        "context_length_exceeded",
        "model_not_found",
        "body_too_large",
    }
    assert 0 < len(error["message"]) <= 300
    assert error["param"] is None or 0 < len(error["param"]) <= 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a chat template that takes tools, so that much can go wrong."""
    return tokenizer_with_tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def hammer(tokenizer: Tokenizer) -> Iterator[Hammer]:
    """An API whose engine says "fine" to everything."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        it = runner.run(stack.enter_async_context(on_a_socket(tokenizer)))
        yield Hammer(runner, it)
        runner.run(stack.aclose())


@asynccontextmanager
async def on_a_socket(tokenizer: Tokenizer) -> AsyncIterator[Http]:
    """A client that comes in as others do."""
    registry = CollectorRegistry()
    script = tokenizer.encode("fine")
    async with served(tokenizer, script, model=AnyPrompt, max_model_len=512) as wire:
        app = app_of(wire, tokenizer, registry, Authenticator())
        async with (
            listening(app) as address,
            httpx.AsyncClient(base_url=address, timeout=PATIENCE_SECONDS) as client,
        ):
            yield Http(client, wire, registry)


def document() -> dict[str, Any]:
    """The API as OpenAPI describes it."""
    kinds = [(kind, "validation") for kind in PATHS.values()]
    _, parts = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Drafthouse", "version": "1"},
        "components": {"schemas": parts["$defs"]},
        "paths": {
            path: {
                "post": {
                    "requestBody": {
                        "required": True,
                        "content": {
                            "application/json": {
                                "schema": {"$ref": f"#/components/schemas/{kind.__name__}"}
                            }
                        },
                    },
                    "responses": {"200": {"description": "An answer."}},
                }
            }
            for path, kind in PATHS.items()
        },
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE])
def test_bodies_that_schemathesis_thinks_of(
    hammer: Hammer, path: str, mode: GenerationMode
) -> None:
    """By the schema of the body or against it: never a fault of ours."""
    operation = schemathesis.openapi.from_dict(document())[path]["POST"]

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        body = case.body
        hammer.send(path, body if isinstance(body, bytes) else json.dumps(body).encode())

    send()
    hammer.check()


def test_mutated_bodies(hammer: Hammer) -> None:
    """Values of other types and sizes, fields gone or doubled, bytes turned, cut and put in."""
    generator = random.Random(7)
    before = hammer.statuses.copy()
    for number in range(NUM_MUTATED):
        path, body = BODIES[number % len(BODIES)]
        mutate = MUTATIONS[number % len(MUTATIONS)]
        hammer.send(path, mutate(generator, copy.deepcopy(body)))
        if number % 200 == 0:
            hammer.check()
    hammer.check()
    statuses = hammer.statuses - before
    assert statuses.total() == NUM_MUTATED
    assert NUM_MUTATED - statuses[httpx.codes.OK] >= NUM_MALFORMED


def changed_values(generator: random.Random, body: dict[str, Any]) -> bytes:
    """One to three values, at any depth, are something else."""
    for _ in range(generator.randint(1, 3)):
        parent, key = generator.choice(list(places(body)))
        parent[key] = copy.deepcopy(generator.choice(JUNK))
    return written(body)


def moved_fields(generator: random.Random, body: dict[str, Any]) -> bytes:
    """A value is gone, or another's, or there is one of a name that nobody knows."""
    parent, key = generator.choice(list(places(body)))
    _, other = generator.choice(list(places(body)))
    match generator.randrange(3):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[str(other)] = parent.pop(key)
        case _ if isinstance(parent, dict):
            parent["".join(generator.choices("abc_é", k=4))] = 1
        case _:
            parent.append(parent[key])
    return written(body)


def turned_bytes(generator: random.Random, body: dict[str, Any]) -> bytes:
    """It may not be JSON any more, or not Unicode."""
    data = bytearray(written(body))
    for _ in range(generator.randint(1, 8)):
        place = generator.randrange(len(data))
        match generator.randrange(4):
            case 0:
                data[place] = generator.randrange(256)
            case 1:
                data[place:place] = generator.choice((b"\\ud800", b"NaN", b'"', b"{", b",", b"9"))
            case 2:
                del data[place : place + generator.randint(1, 20)]
            case _:
                start = generator.randrange(len(data))
                data[place:place] = data[start : start + 30]
        data = data or bytearray(b" ")
    return bytes(data)


def noise(generator: random.Random, body: dict[str, Any]) -> bytes:
    """Nothing of the body is left."""
    del body
    return generator.choice(
        (
            b"",
            b"null",
            b"[]",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"messages": ' + b"[" * 150 + b"]" * 150 + b"}",
            b'{"n": ' + b"9" * 5000 + b"}",
            b"\xff\xfe" + generator.randbytes(40),
            generator.randbytes(generator.randrange(300)),
            b" " * 2**18 + b"{}",
        )
    )


MUTATIONS: tuple[Callable[[random.Random, dict[str, Any]], bytes], ...] = (
    changed_values, changed_values, moved_fields, turned_bytes, changed_values, turned_bytes, noise,
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - any JSON
    """Every list and object with each of its keys, at any depth."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def written(body: object) -> bytes:
    """As JSON, escapes for what is not a character included."""
    return json.dumps(body).encode()
