"""Chat completions: what goes in reaches the engine, and what comes out has OpenAI's shape."""

import asyncio

import pytest

from cluster.request import Grammar, GrammarKind, SpeculationParams, StoppingParams
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer
from tests.checkpoints import make_tokenizer
from tests.harness import series
from tests.openai_http import http
from tests.wire import MODEL, PacedTarget, until

TEXT = "Hé 👍!"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: every character beyond ASCII is split over tokens."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


async def test_a_whole_answer(tokenizer: Tokenizer) -> None:
    """Text, reason, usage, seed and speculation are in their places."""
    script = tokenizer.encode(TEXT)
    async with http(tokenizer, script) as it:
        answer = await it.chat(seed=7, model=MODEL)
    num_prompt = len(tokenizer.chat([ChatMessage("user", "Hello")]))
    num_tokens = len(script) + 1
    speculation = answer.pop("speculation")
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "seed": 7,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert 0 < speculation["accepted"] <= speculation["drafted"]
    assert 0 < speculation["steps"] < num_tokens


async def test_every_field_reaches_the_engine(tokenizer: Tokenizer) -> None:
    """Under its own name there, with nothing lost on the way."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"7": 1.5, "9": -100},
        "allowed_token_ids": [7, 9],
        "bad_words": ["zz"],
        "seed": -1,
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "stop": ["x", "yz"],
        "stop_token_ids": [8],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "response_format": {"type": "json_object"},
        "logprobs": True,
        "top_logprobs": 1,
        "speculation": {"enabled": False, "max_tokens": 3},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "stream": None,
    }
    async with http(tokenizer, tokenizer.encode("a")) as it:
        await it.chat(**fields)
        [sent] = it.wire.backend.requests
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert sampling.logit_bias == ((7, 1.5), (9, -100.0))
    assert (sampling.allowed_token_ids, sampling.seed) == ((7, 9), 2**64 - 1)
    assert sampling.banned_sequences
    assert sent.stopping == StoppingParams(
        max_tokens=9,
        min_tokens=2,
        stop=("x", "yz"),
        stop_token_ids=(8,),
        ignore_eos=True,
        include_stop_text=True,
    )
    assert sent.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    assert (sent.logprobs, sent.top_logprobs) == (True, 1)
    assert sent.speculation == SpeculationParams(enabled=False, max_tokens=3)
    assert sent.prompt_token_ids == tokenizer.chat([ChatMessage("user", "Hello")])


async def test_turns_are_those_of_the_template(tokenizer: Tokenizer) -> None:
    """Parts are one text, `developer` is the system's role, earlier answers may be given back."""
    earlier = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [
        {"role": "developer", "content": "Be kind."},
        earlier,
        {"role": "user", "content": parts},
    ]
    async with http(tokenizer) as it:
        await it.chat(messages=turns)
        [sent] = it.wire.backend.requests
    expected = [
        ChatMessage("system", "Be kind."),
        ChatMessage("assistant", "Hi"),
        ChatMessage("user", "ab"),
    ]
    assert sent.prompt_token_ids == tokenizer.chat(expected)


async def test_a_stream_is_the_whole_in_parts(tokenizer: Tokenizer) -> None:
    """Joined, its chunks are the answer; the first has the role, the usage comes at the end."""
    fields = {"logprobs": True, "top_logprobs": 1, "seed": 3, "return_token_ids": True}
    async with http(tokenizer, tokenizer.encode(TEXT * 9)) as it:
        whole = await it.chat(**fields)
        *chunks, last = await it.stream(stream_options={"include_usage": True}, **fields)
    [choice] = whole["choices"]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert len(parts) > 1
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (
        len(parts) - 1
    )
    assert "".join(part["delta"].get("content", "") for part in parts) == TEXT * 9
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == (
        choice["logprobs"]["content"]
    )
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    cached = {"prompt_tokens_details": {"cached_tokens": whole["usage"]["prompt_tokens"] - 1}}
    assert (last["choices"], last["usage"]) == ([], whole["usage"] | cached)
    assert last["speculation"] == whole["speculation"]


async def test_logprobs_have_tokens_and_bytes(tokenizer: Tokenizer) -> None:
    """The bytes of all tokens are the text's; a part of a character is named by its bytes."""
    async with http(tokenizer, tokenizer.encode(TEXT)) as it:
        answer = await it.chat(logprobs=True, top_logprobs=1)
        grpc = await it.wire.ask(
            token_ids=tokenizer.chat([ChatMessage("user", "Hello")]), logprobs=True
        )
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == grpc.logprobs
    *spoken, end = content
    assert bytes(byte for entry in spoken for byte in entry["bytes"]).decode() == TEXT
    assert (end["token"], bytes(end["bytes"])) == ("<|im_end|>", b"<|im_end|>")
    assert "bytes:\\xc3" in {entry["token"] for entry in spoken}
    for entry in content:
        assert entry["top_logprobs"] == [{key: entry[key] for key in ("token", "logprob", "bytes")}]


async def test_several_answers(tokenizer: Tokenizer) -> None:
    """Each has its index and a seed of its own; the usage counts the prompt once."""
    async with http(tokenizer, tokenizer.encode("abc")) as it:
        whole = await it.chat(n=3, seed=5)
        chunks = await it.stream(n=3, seed=5)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    seeds = [choice["seed"] for choice in whole["choices"]]
    assert (seeds[0], len(set(seeds))) == (5, 3)
    assert whole["usage"]["completion_tokens"] == 12
    ends = [part for chunk in chunks for part in chunk["choices"] if part["finish_reason"]]
    assert sorted((end["index"], end["seed"]) for end in ends) == list(enumerate(seeds))


async def test_length_is_a_reason(tokenizer: Tokenizer) -> None:
    """An answer that max_tokens ends says so, under either name of the limit."""
    async with http(tokenizer, tokenizer.encode("abcdef")) as it:
        for limit in ("max_tokens", "max_completion_tokens"):
            answer = await it.chat(**{limit: 3})
            [choice] = answer["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


async def test_x70_a_client_that_goes_ends_its_request(tokenizer: Tokenizer) -> None:
    """Whole or streamed, and before the first token: the sequence is gone, and was an abort."""
    for stream in (False, True):
        async with http(tokenizer, tokenizer.encode("a" * 50), target=PacedTarget) as it:
            asking = asyncio.create_task(it.chat(stream=stream))
            await until(lambda it=it: it.wire.target.num_begun > 0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            it.wire.target.allow(2)
            await until(lambda it=it: it.wire.backend.engine.load().running == 0)
            counted = series(it.metrics)
        assert counted["drafthouse_requests_total{outcome=abort}"] == 1


async def test_the_models(tokenizer: Tokenizer) -> None:
    """One is listed, and found by its name, with a slash or a space in it."""
    async with http(tokenizer) as it:
        listed = (await it.client.get("/v1/models")).json()
        found = (await it.client.get(f"/v1/models/{MODEL}")).json()
        missing = await it.client.get("/v1/models/some/other")
    assert listed == {"object": "list", "data": [found]}
    assert (found["id"], found["object"], found["max_model_len"]) == (MODEL, "model", 256)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
