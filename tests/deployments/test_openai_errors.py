"""Errors over HTTP: each has OpenAI's shape, and its one place in the table."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import cluster.errors
from cluster.errors import (
    ContextExceeded,
    DrafthouseError,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    RequestFailed,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from cluster.messages import TokenDelta
from cluster.request import Request
from cluster.tenant import ANYONE, Tenant
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools.keys import KeyOptions, create_key
from deployments.auth import Authenticator
from deployments.keys import KeyRing
from deployments.openai_errors import error_response, failure_of
from tests.checkpoints import make_tokenizer
from tests.harness import series
from tests.openai_http import MAX_BODY_BYTES, TURNS, AnyPrompt, events, http, http_over
from tests.wire import PacedTarget, served, until

CHAT = "chat/completions"
LARGE = [{"role": "user", "content": "a" * MAX_BODY_BYTES}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: a token for every byte."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


def body_of(error: BaseException) -> tuple[httpx.Response, dict[str, object]]:
    """The answer that an error becomes."""
    answer = error_response(error)
    response = httpx.Response(answer.status_code, headers=answer.headers, content=answer.body)
    return response, response.json()["error"]


def test_every_error_has_its_place() -> None:
    """All that callers can cause, or wait out, has a status of its own; the rest is a fault."""
    told = {
        InvalidRequest: 400,
        ContextExceeded: 400,
        UnknownModel: 404,
        Unauthenticated: 401,
        QuotaExceeded: 429,
        Overloaded: 429,
        Unavailable: 503,
        cluster.errors.TargetUnavailable: 503,
        cluster.errors.DrafterUnavailable: 503,
        cluster.errors.DeadlineExceeded: 504,
    }
    kinds = [
        kind
        for _, kind in inspect.getmembers(cluster.errors, inspect.isclass)
        if issubclass(kind, DrafthouseError)
    ]
    assert told.keys() <= set(kinds)
    for kind in kinds:
        assert failure_of(kind.__new__(kind)).status == told.get(kind, 500), kind


def test_what_callers_hear_of_our_faults() -> None:
    """A request that failed says why; of anything else nothing gets out."""
    answer, error = body_of(RequestFailed("no token is left"))
    assert (answer.status_code, error["message"]) == (500, "no token is left")
    for secret in (ValueError("/home/me/key"), cluster.errors.OutOfBlocks(needed=3, free=1)):
        answer, error = body_of(secret)
        assert answer.status_code == 500
        assert error == {
            "message": "internal error; the server's log says more",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }


def test_errors_that_pass_say_when_to_try_again() -> None:
    """In whole seconds, at least one; those that stay say nothing."""
    for error in (Overloaded(waiting=3, limit=3), Unavailable("not yet")):
        answer, _ = body_of(error)
        assert int(answer.headers["retry-after"]) >= 1
    answer, _ = body_of(InvalidRequest("n", "is wrong"))
    assert "retry-after" not in answer.headers


async def test_a_full_queue_is_429(tokenizer: Tokenizer) -> None:
    """At once, with a time to come back; it is counted as a refusal."""
    limits = {"max_num_waiting": 1, "max_num_seqs": 1}
    async with http(tokenizer, tokenizer.encode("a"), target=PacedTarget, **limits) as it:
        engine, target = it.wire.backend.engine, it.wire.target
        taken = []
        for running, waiting in ((1, 0), (1, 1)):
            taken.append(asyncio.create_task(it.chat()))
            await until(
                lambda expected=(running, waiting): (
                    (engine.load().running, engine.load().waiting) == expected
                )
            )
        answer = await it.client.post(f"/v1/{CHAT}", json={"messages": TURNS, "stream": True})
        counted = series(it.metrics)
        target.allow(20)
        await asyncio.gather(*taken)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    assert counted["drafthouse_requests_total{outcome=refused}"] == 1


async def test_before_a_target_is_there(tokenizer: Tokenizer) -> None:
    """503, and when to ask again."""
    async with http(tokenizer) as it:
        it.wire.backend.is_ready = False
        answer = await it.client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


async def test_the_body_has_a_limit(tokenizer: Tokenizer) -> None:
    """Whether its length is told or not, and before it is parsed."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1000 + 1):
            yield b" " * 1000

    async with http(tokenizer) as it:
        told = await it.client.post(f"/v1/{CHAT}", json={"messages": LARGE})
        untold = await it.client.post(f"/v1/{CHAT}", content=pieces())
        at_the_limit = await it.client.post(f"/v1/{CHAT}", content=b" " * MAX_BODY_BYTES)
    for answer in (told, untold):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, "body_too_large")
        assert str(MAX_BODY_BYTES) in error["message"]
    assert at_the_limit.json()["error"]["param"] == "body"


async def test_fields_are_named(tokenizer: Tokenizer) -> None:
    """Where a field is wrong, unknown, not served or there twice the error says which it is."""
    turn = {"role": "user", "content": "a"}
    wrong: tuple[tuple[dict[str, object], str, str], ...] = (
        ({"temperature": -1}, "temperature", "temperature: -1.0 is neither 0 nor in"),
        ({"temperature": "1"}, "temperature", "temperature: Input should be a valid number"),
        ({"top_p": 0}, "top_p", "top_p: 0.0 is not in (0, 1]"),
        ({"n": 17}, "n", "n: 17 is not in [1, 16]"),
        ({"n": -1}, "n", "n: Input should be greater than or equal to 0"),
        ({"n": 1.0}, "n", "n: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 is below 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: 0 is"),
        ({"max_completion_tokens": 1, "max_tokens": 1}, "max_completion_tokens", "excludes"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "min_tokens: 9 is not in [0, 3]"),
        ({"stop": ["a"] * 17}, "stop", "stop: 17 are over the limit of 16"),
        ({"stop": ["a", ""]}, "stop[1]", "stop[1]: 0 characters is not in [1, 256]"),
        ({"stop": [1]}, "stop[0]", "stop[0]: Input should be a valid string"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "logit_bias: 300 is not in the vocabulary"),
        ({"logit_bias": {"7": 101}}, "logit_bias[7]", "logit_bias[7]: 101.0 is not in"),
        ({"logit_bias": {"x": 1}}, "logit_bias[x]", "logit_bias[x]: is not a token id"),
        ({"logit_bias": {str(2**32): 1}}, f"logit_bias[{2**32}]", "is not in the vocabulary"),
        ({"bad_words": ["a", ""]}, "bad_words[1]", "bad_words[1]: 0 characters is not in"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: 21 is not in"),
        ({"stream_options": {}}, "stream_options", "stream_options: needs stream"),
        (
            {"speculation": {"max_tokens": 65}},
            "speculation.max_tokens",
            "speculation.max_tokens: 65",
        ),
        ({"speculation": {"k": 1}}, "speculation.k", "speculation.k: is not known here"),
        ({"frobnicate": 1}, "frobnicate", "frobnicate: is not known here"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "reasoning_effort: is not served"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            "stream_options.include_obfuscation",
            "is not served",
        ),
        ({"messages": []}, "messages", "messages: is empty"),
        ({"messages": [turn] * 1025}, "messages", "messages: 1025 are over the limit of 1024"),
        ({"messages": [turn, {"role": "robot"}]}, "messages[1]", "messages[1]: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Field required"),
        ({"messages": [turn | {"name": "x"}]}, "messages[0].name", "is not known here"),
        (
            {"messages": [turn | {"content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "Input should be 'text'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
            "response_format.json_schema.schema",
            "Field required",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"not": {"type": "string"}}},
                }
            },
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: ",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format: "),
    )
    async with http(tokenizer) as it:
        for fields, param, message in wrong:
            status, error = await it.failure(CHAT, {"messages": TURNS} | fields)
            assert (status, error["type"]) == (400, "invalid_request_error"), fields
            assert error["param"] == param, error
            assert message in error["message"], error
        assert not it.wire.backend.requests


async def test_bodies_that_cannot_be_read(tokenizer: Tokenizer) -> None:
    """No JSON, no Unicode, a name twice, too deep: said in so many words."""
    wrong = (
        (b"", "body", "body: is not JSON"),
        (b"[]", "body", "body: is not a JSON object"),
        (b"\xff{}", "body", "body: is not Unicode text"),
        (rb'{"model": "\ud800"}', "body", "body: is not Unicode text"),
        (b'{"n": NaN}', "body", "body: is not JSON: NaN"),
        (b'{"n": 1, "n": 2}', "n", "n: is given twice"),
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "body", "body: is nested deeper than 100"),
        (b'{"a": ' * 40_000, "body", "body: is nested too deeply"),
    )
    async with http(tokenizer) as it:
        for content, param, message in wrong:
            answer = await it.client.post("/v1/completions", content=content)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert error["message"].startswith(message), error


async def test_a_context_that_is_full(tokenizer: Tokenizer) -> None:
    """Has the code by which clients know it, and the name the prompt has there."""
    async with http(tokenizer, max_model_len=64) as it:
        for path, body, param in (
            (CHAT, {"messages": [{"role": "user", "content": "a" * 64}]}, "messages"),
            ("completions", {"prompt": "a" * 64}, "prompt"),
            ("completions", {"prompt": [5] * 64}, "prompt"),
        ):
            status, error = await it.failure(path, body)
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == param
            assert "in a context of 64" in error["message"]


async def test_paths_and_methods(tokenizer: Tokenizer) -> None:
    """What is not there is told in the same shape."""
    async with http(tokenizer) as it:
        missing = await it.client.get("/v1/embeddings")
        wrong = await it.client.get(f"/v1/{CHAT}")
        unknown = await it.failure("completions", {"prompt": "a", "model": "gpt-4"})
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["type"] == wrong.json()["error"]["type"]
    assert (unknown[0], unknown[1]["code"], unknown[1]["param"]) == (
        404,
        "model_not_found",
        "model",
    )


class OneKey(Authenticator):
    """Knows one key, of a tenant that may ask nothing."""

    def tenant_of(self, authorization: str | None) -> Tenant:
        """As the real one's, for the two headers there are."""
        if authorization == "Bearer good":
            return ANYONE
        if authorization == "Bearer other":
            return Tenant(name="other", models=("another model",))
        raise Unauthenticated("unknown")


async def test_x79_keys_are_asked_for(tokenizer: Tokenizer) -> None:
    """On every path, before the body is read; and who may not ask a model does not see it."""
    async with (
        served(tokenizer, model=AnyPrompt) as wire,
        http_over(wire, tokenizer, OneKey()) as it,
    ):
        for method, path in (
            ("POST", CHAT),
            ("POST", "completions"),
            ("GET", "models"),
            ("GET", "models/tiny model"),
        ):
            answer = await it.client.request(method, f"/v1/{path}", content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        other = {"Authorization": "Bearer other"}
        listed = await it.client.get("/v1/models", headers=other)
        assert listed.json()["data"] == []
        for path in (f"/v1/{CHAT}", "/v1/completions"):
            body = {"messages": TURNS} if CHAT in path else {"prompt": "a"}
            answer = await it.client.post(path, json=body, headers=other)
            assert answer.status_code == 404
            good = {"Authorization": "Bearer good"}
            assert (await it.client.post(path, json=body, headers=good)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_quota_is_429(tokenizer: Tokenizer, tmp_path: Path, *, stream: bool) -> None:
    """Past its requests a minute a tenant hears which limit it was and when to come back.

    Another one is served meanwhile.
    """
    path = tmp_path / "keys.yaml"
    few = create_key(path, "few", KeyOptions(requests_per_minute=2.0))
    other = create_key(path, "other", KeyOptions(requests_per_minute=2.0))
    body = {"messages": TURNS, "stream": stream}
    async with (
        served(tokenizer, model=AnyPrompt) as wire,
        http_over(wire, tokenizer, Authenticator(KeyRing(path))) as it,
    ):
        answers = [
            await it.client.post(
                f"/v1/{CHAT}", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            for key in (few, few, few, other)
        ]
        assert len(wire.backend.requests) == 3
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    refused = answers[2]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json() == {
        "error": {
            "message": "requests a minute: the limit of 2 is reached",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    }


async def test_an_error_in_the_middle_of_a_stream(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is an event of its own after all that came before it."""
    token_ids = tokenizer.encode("ab")

    async def breaking(request: Request) -> AsyncIterator[TokenDelta]:
        for token_id in token_ids:
            yield TokenDelta(request_id=request.request_id, token_ids=(token_id,))
        raise Unavailable("the target is gone")

    async with http(tokenizer) as it:
        monkeypatch.setattr(it.wire.backend, "generate", breaking)
        answer = await it.client.post(f"/v1/{CHAT}", json={"messages": TURNS, "stream": True})
        whole = await it.client.post(f"/v1/{CHAT}", json={"messages": TURNS})
    *chunks, error = events(answer.text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "ab"
    assert error["error"]["message"] == "the target is gone"
    assert whole.status_code == 503
