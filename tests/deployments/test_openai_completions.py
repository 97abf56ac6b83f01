"""Completions: any prompt, echoed or not, with logprobs in OpenAI's older shape."""

import pytest

from cluster.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import make_tokenizer
from tests.openai_http import http
from tests.wire import MODEL

TEXT = "é!"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: every character beyond ASCII is split over tokens."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


async def test_a_whole_answer(tokenizer: Tokenizer) -> None:
    """A text, why it ended, and what it took."""
    async with http(tokenizer, tokenizer.encode(TEXT)) as it:
        answer = await it.complete(seed=1)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "seed": 1}
    ]
    assert answer["usage"]["completion_tokens"] == 4


async def test_every_form_of_prompt(tokenizer: Tokenizer) -> None:
    """A text, its ids, and a list of one of these are one prompt; of several none is left out."""
    token_ids = list(tokenizer.encode("abc"))
    async with http(tokenizer) as it:
        for prompt in ("abc", ["abc"], token_ids, [token_ids]):
            await it.complete(prompt=prompt)
        assert {sent.prompt_token_ids for sent in it.wire.backend.requests} == {tuple(token_ids)}
        for prompt in (["a", "b"], [token_ids, token_ids], [], "", [[]], [""]):
            status, error = await it.failure("completions", {"prompt": prompt})
            assert (status, error["param"]) == (400, "prompt"), error


async def test_sixteen_tokens_unless_said(tokenizer: Tokenizer) -> None:
    """OpenAI's default of this path, and of no other."""
    async with http(tokenizer, tokenizer.encode("a" * 40)) as it:
        answer = await it.complete()
        longer = await it.complete(max_tokens=30)
        chat = await it.chat()
    assert answer["usage"]["completion_tokens"] == 16
    assert longer["usage"]["completion_tokens"] == 30
    assert chat["usage"]["completion_tokens"] == 41


async def test_logprobs_in_lists(tokenizer: Tokenizer) -> None:
    """An entry for each token: its name, logprob, most probable ones, and where its text begins."""
    async with http(tokenizer, tokenizer.encode(TEXT)) as it:
        answer = await it.complete(logprobs=1)
        grpc = await it.wire.ask(prompt="abc", logprobs=True)
        bare = await it.complete(logprobs=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"]
    assert logprobs["token_logprobs"] == grpc.logprobs
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert logprobs["top_logprobs"] == [
        {name: logprob} for name, logprob in zip(logprobs["tokens"], grpc.logprobs, strict=True)
    ]
    assert bare["choices"][0]["logprobs"] == logprobs | {"top_logprobs": None}


async def test_echo(tokenizer: Tokenizer) -> None:
    """The prompt comes before the answer, with logprobs of all its tokens but the first."""
    prompt = "né"
    token_ids = tokenizer.encode(prompt)
    async with http(tokenizer, tokenizer.encode(TEXT)) as it:
        by_text = await it.complete(prompt=prompt, echo=True, logprobs=0)
        by_ids = await it.complete(prompt=list(token_ids), echo=True, logprobs=0)
        chunks = await it.stream("completions", prompt=prompt, echo=True, logprobs=0, n=1)
        grpc = await it.wire.ask(prompt=prompt, logprobs=True, prompt_logprobs=True)
        several = await it.complete(prompt=prompt, echo=True, n=2)
    [choice] = by_text["choices"]
    assert choice["text"] == prompt + TEXT
    logprobs = choice["logprobs"]
    told = [logprob for chunk in grpc.chunks for logprob in chunk.prompt_logprobs]
    assert len(told) == len(token_ids) - 1
    assert logprobs["token_logprobs"] == [None, *told, *grpc.logprobs]
    assert logprobs["tokens"][: len(token_ids)] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 3, 4]
    [same] = by_ids["choices"]
    assert (same["text"], same["logprobs"]) == (choice["text"], logprobs)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [entry for part in parts for entry in part["logprobs"][name]] == logprobs[name]
    assert [part["text"] for part in several["choices"]] == [prompt + TEXT] * 2


async def test_what_echo_cannot_tell_is_refused(tokenizer: Tokenizer) -> None:
    """Most probable tokens of the prompt, and logprobs of it for several answers."""
    async with http(tokenizer) as it:
        for fields, param in (({"logprobs": 1}, "logprobs"), ({"logprobs": 0, "n": 2}, "n")):
            body = {"prompt": "a", "echo": True} | fields
            status, error = await it.failure("completions", body)
            assert (status, error["param"]) == (400, param)


async def test_a_stream_of_several_answers(tokenizer: Tokenizer) -> None:
    """Each answer's chunks join to its text, each begins with the prompt that is echoed."""
    async with http(tokenizer, tokenizer.encode(TEXT * 20)) as it:
        chunks = await it.stream("completions", n=2, max_tokens=45, echo=True)
    texts = ["", ""]
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["abc" + TEXT * 15] * 2
