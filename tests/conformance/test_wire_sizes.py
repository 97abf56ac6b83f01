"""Large prompts and long answers over a real socket: whole, in order, and at nobody's cost."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from cluster.messages import SequenceRows
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeTarget
from tests.openai_http import AnyPrompt
from tests.wire import NUM_PROMPT, Wire, served

pytestmark = pytest.mark.wire

WORD = " " + "ab" * 32  # one token, so that megabytes of it are a context that tests can hold
MAX_MESSAGE_BYTES = 8 * 2**20
MAX_MODEL_LEN = 2**17
LARGEST_BYTES = 4_200_000  # beyond the 4 MiB that gRPC takes unless it is told


class ForgetfulTarget(FakeTarget):
    """Keeps nothing of what it reads: for models that look at positions only, however far on."""

    def _write(self, rows: SequenceRows) -> list[int]:
        return [0] * len(rows.token_ids)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, with tokens for the word and its parts."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300, corpus=(WORD,))
    return load_tokenizer(folder)


def prompt_of(num_bytes: int) -> str:
    """The word so often, and a part of it."""
    return (WORD * (num_bytes // len(WORD) + 1))[:num_bytes]


def roomy(tokenizer: Tokenizer) -> AbstractAsyncContextManager[Wire]:
    """A server with room for the largest prompt, whose answers are all the same."""
    return served(
        tokenizer,
        tokenizer.encode("fine"),
        model=AnyPrompt,
        target=ForgetfulTarget,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=4096,
    )


@pytest.mark.parametrize("num_bytes", [10**6, LARGEST_BYTES])
async def test_x71_a_large_prompt_is_answered(tokenizer: Tokenizer, num_bytes: int) -> None:
    """Every byte of it reaches the engine, every token is counted, and the answer is whole."""
    prompt = prompt_of(num_bytes)
    token_ids = tokenizer.encode(prompt)
    async with roomy(tokenizer) as wire:
        answer = await wire.ask(prompt=prompt)
        [sent] = wire.backend.requests
    assert sent.prompt_token_ids == token_ids
    num_prompt = len(token_ids)
    assert num_prompt >= num_bytes // len(WORD)
    usage = answer.last.usage
    assert (answer.text, usage.completion_tokens) == ("fine", 5)  # with its end
    assert (usage.prompt_tokens, usage.total_tokens) == (num_prompt, num_prompt + 5)


async def test_x71_a_large_prompt_holds_up_nobody(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is made into tokens others are answered."""
    encode, num_answered, meanwhile = tokenizer.encode, 0, []

    def watched(text: str) -> tuple[int, ...]:
        before = num_answered
        token_ids = encode(text)
        meanwhile.append(num_answered - before)
        return token_ids

    async with roomy(tokenizer) as wire:
        monkeypatch.setattr(tokenizer, "encode", watched)
        large = asyncio.create_task(wire.ask(prompt=prompt_of(LARGEST_BYTES)))
        while not large.done():
            assert (await wire.ask()).text == "fine"
            num_answered += 1
        assert (await large).text == "fine"
    assert len(meanwhile) == 1
    assert meanwhile[0] >= 5


async def test_ten_thousand_tokens_are_streamed(tokenizer: Tokenizer) -> None:
    """All of them, in order, each once, and usage says so; drafts were most of them."""
    text = " ".join(str(number) for number in range(3000))[:10_000]
    script = tokenizer.encode(text)
    assert len(script) == 10_000
    async with served(
        tokenizer, script, model=AnyPrompt, target=ForgetfulTarget, max_model_len=2**14
    ) as wire:
        answer = await wire.ask(stopping={"max_tokens": 10_000}, logprobs=True)
    assert answer.token_ids == list(script)
    assert answer.text == text
    assert len(answer.logprobs) == 10_000
    *before, last = answer.chunks
    assert not any(chunk.finish_reason or chunk.HasField("usage") for chunk in before)
    assert sum(chunk.num_steps for chunk in answer.chunks) == 1 + 2000  # the prompt's step
    assert last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (NUM_PROMPT, 10_000)
    assert usage.total_tokens == NUM_PROMPT + 10_000
