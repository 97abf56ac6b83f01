"""The chat command against a real server."""

import asyncio
import io
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.errors import DrafthouseError, Unavailable
from cluster.request import Grammar, GrammarKind
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools import chat as chat_module
from cluster.tools import connection
from cluster.tools.chat import AnswerOptions, Origins, chat
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.wire import EOS, PacedTarget, Wire, served, until

CYAN, RESET = "\x1b[36m", "\x1b[0m"
USER_TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, without merges, so that a token of ASCII is a character."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=259))


async def said(wire: Wire, console: Console | None = None, **arguments: object) -> str:
    """What the command prints; it runs in a thread, as it would in another process."""
    console = console or Console(file=io.StringIO(), highlight=False)
    await asyncio.to_thread(
        chat,
        f"127.0.0.1:{wire.port}",
        console=console,
        **arguments,  # type: ignore[arg-type]
    )
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def script_after(tokenizer: Tokenizer, num_prompt: int, text: str) -> list[int]:
    """A script for `served`, which counts from the third token of the prompt on."""
    return [5] * (num_prompt - 3) + list(tokenizer.encode(text))


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user types, after which the input ends."""
    left = iter(lines)

    def next_line(_: object, prompt: str = "") -> str:
        del prompt
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(Console, "input", next_line)


@pytest.mark.wire
async def test_once_prints_the_answer(tokenizer: Tokenizer) -> None:
    """The text as it came, and nothing else where no person looks."""
    num_prompt = len(tokenizer.encode(USER_TURN))
    async with served(tokenizer, script_after(tokenizer, num_prompt, "hé [b]👍")) as wire:
        assert await said(wire, once="hi") == "hé [b]👍\n"


@pytest.mark.wire
async def test_json_prints_the_whole_account(tokenizer: Tokenizer) -> None:
    """One object: text, token_ids, finish_reason, usage, seed, speculation."""
    num_prompt = len(tokenizer.encode(USER_TURN))
    async with served(tokenizer, script_after(tokenizer, num_prompt, "haiku")) as wire:
        grammar = Grammar(GrammarKind.REGEX, "[a-z]+")
        options = AnswerOptions(seed=5, temperature=0.0, max_tokens=20, grammar=grammar)
        printed = json.loads(await said(wire, once="hi", json_output=True, options=options))
        sent = wire.backend.requests[0]
    assert (sent.sampling.temperature, sent.stopping.max_tokens) == (0.0, 20)
    assert sent.grammar == grammar
    assert printed == {
        "text": "haiku",
        "token_ids": [*tokenizer.encode("haiku"), EOS],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 6,
            "total_tokens": num_prompt + 6,
            "cached_tokens": 0,
        },
        "seed": 5,
        "speculation": {"steps": 2, "drafted": 4, "accepted": 4},
    }


@pytest.mark.wire
async def test_accepted_drafts_have_a_colour(tokenizer: Tokenizer) -> None:
    """On a terminal: the target's own tokens plain, accepted drafts coloured."""
    num_prompt = len(tokenizer.encode(USER_TURN))
    script = script_after(tokenizer, num_prompt, "abcdefg")
    async with served(tokenizer, script, num_speculative_tokens=2) as wire:
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="standard", width=200
        )
        printed = await said(wire, console, once="hi")
    assert printed.startswith(f"a{CYAN}bc{RESET}d{CYAN}ef{RESET}g\n")
    assert "8 tokens in 4 steps, 5 of 6 drafts accepted, ended by stop" in printed


@pytest.mark.wire
async def test_a_conversation_is_remembered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn sends all before it; the end of the input is the end."""
    type_lines(monkeypatch, "hi", "", "more")
    num_prompt = len(tokenizer.encode(USER_TURN))
    async with served(tokenizer, script_after(tokenizer, num_prompt, "yes")) as wire:
        await said(wire, options=AnswerOptions(max_tokens=3))
        first, second = wire.backend.requests
    assert len(first.prompt_token_ids) == num_prompt
    assert second.prompt_token_ids[: num_prompt + 3] == (
        *first.prompt_token_ids,
        *tokenizer.encode("yes"),
    )


@pytest.mark.wire
async def test_a_turn_that_fails_ends_a_pipe_but_no_conversation(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal what was said is kept, and the next line is asked; a program hears of it."""
    num_prompt = len(tokenizer.encode(USER_TURN))
    async with served(tokenizer, script_after(tokenizer, num_prompt, "yes")) as wire:
        terminal = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200)
        type_lines(monkeypatch, "x" * 5000, "hi")
        printed = await said(wire, terminal, options=AnswerOptions(max_tokens=3))
        type_lines(monkeypatch, "x" * 5000, "hi")
        with pytest.raises(DrafthouseError, match="INVALID_ARGUMENT"):
            await said(wire)
    assert "(INVALID_ARGUMENT: " in printed
    assert "\nyes\n" in printed


@pytest.mark.wire
async def test_interrupt_cancels_the_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle leaves no sequence behind on the server."""
    num_prompt = len(tokenizer.encode(USER_TURN))
    script = script_after(tokenizer, num_prompt, "a" * 40)
    monkeypatch.setattr(chat_module, "as_json", lambda _: pytest.fail("the answer went on"))
    async with served(tokenizer, script, target=PacedTarget) as wire:
        assert isinstance(wire.target, PacedTarget)
        console = InterruptingConsole(file=io.StringIO())
        wire.target.allow(2)
        with pytest.raises(KeyboardInterrupt):
            await said(wire, console, once="hi")
        wire.target.allow()
        await until(lambda: wire.backend.engine.load().running == 0)


class InterruptingConsole(Console):
    """The user presses Ctrl-C at the first text."""

    def out(self, *_: object, **__: object) -> None:
        """Never prints."""
        raise KeyboardInterrupt


@pytest.mark.wire
async def test_what_the_server_refuses_is_one_line(tokenizer: Tokenizer) -> None:
    """The field and the limit, as an error without a stack trace."""
    async with served(tokenizer) as wire:
        with pytest.raises(DrafthouseError, match=r"INVALID_ARGUMENT: sampling.temperature: 999"):
            await said(wire, once="hi", options=AnswerOptions(temperature=999.0))


def test_no_server_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nothing listens is named."""
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.05)
    with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1"):
        chat("127.0.0.1:1", once="hi")


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 4), st.integers(0, 9)),
        max_size=8,
    )
)
def test_every_character_has_its_tokens_origin(
    steps: list[tuple[list[int], int, int]],
) -> None:
    """Whatever is held back and for how long: each character is marked as its own token was.

    Token n gives n characters.
    """

    def text_of(token_ids: Iterable[int]) -> str:
        return "".join("x" * token_id for token_id in token_ids)

    origins = Origins(text_of)
    expected: list[bool] = []
    seen: list[bool] = []
    for token_ids, num_right, num_chars in steps:
        num_accepted = min(num_right, len(token_ids))
        for place, token_id in enumerate(token_ids):
            expected += [place < num_accepted] * token_id
        text = "x" * min(num_chars, len(expected) - len(seen))
        chunk = inference_pb2.GenerateChunk(
            text=text, token_ids=token_ids, num_accepted=num_accepted, num_steps=1
        )
        for run, accepted in origins.split(chunk):
            seen += [accepted] * len(run)
    assert seen == expected[: len(seen)]
