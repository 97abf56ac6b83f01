"""Tool calls: what makes a model call, and how calls are told from text."""

from pathlib import Path

import pytest

from cluster.errors import InvalidRequest
from cluster.grammar.compiler import GrammarCompiler, check_grammar
from cluster.request import Grammar
from cluster.text.tokenizer import Tokenizer, ToolCall, load_tokenizer
from deployments.openai_tools import (
    MAX_CALLS,
    Functions,
    ToolCallReader,
    calls_grammar,
    check_template,
    text_with_calls_grammar,
)
from tests.checkpoints import make_tokenizer
from tests.openai_http import Http, http, tokenizer_with_tools

# Names of options of Lark grammars, and its marks, stand in a schema like any other text.
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "[the stop] <|not a token|> <[1]>"},
        "temperature": {"$ref": "#/$defs/degrees"},
    },
    "required": ["city", "temperature"],
    "additionalProperties": False,
    "$defs": {"degrees": {"type": "number"}},
}
FUNCTIONS: Functions = {"weather": WEATHER, "now": None}
CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "temperature": 4}}\n</tool_call>'
)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WRONG = CALL.replace("4", '"4"')
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
PARSED = ToolCall("weather", {"city": "Rom", "temperature": 4})
ASK = [{"role": "user", "content": "Hot?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a chat template that takes tools."""
    return tokenizer_with_tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With one that takes none."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("plain"), vocab_size=300))


def matches(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a whole answer may be this text."""
    check_grammar(grammar, tokenizer)
    matcher = GrammarCompiler(tokenizer.vocabulary).matcher(grammar)
    token_ids = tokenizer.encode(text)
    return matcher.follow(token_ids) == len(token_ids) and matcher.may_end


def test_the_grammar_of_calls_allows_valid_ones_only(tokenizer: Tokenizer) -> None:
    """Known names, arguments by their schema with its definitions, and nothing around a call."""
    one, several = (calls_grammar(FUNCTIONS, several=several) for several in (False, True))
    for grammar in (one, several):
        assert matches(tokenizer, grammar, CALL)
        assert matches(tokenizer, grammar, NOW)
        for text in ("", "Hi", f"Hi {CALL}", WRONG, CALL.replace("weather", "whether")):
            assert not matches(tokenizer, grammar, text)
        assert not matches(tokenizer, grammar, NOW.replace("{}", '{"a": 1}'))
    assert matches(tokenizer, several, "\n".join([CALL] * MAX_CALLS))
    assert not matches(tokenizer, several, "\n".join([CALL] * (MAX_CALLS + 1)))
    assert not matches(tokenizer, one, f"{CALL}\n{CALL}")


def test_the_grammar_of_text_with_calls(tokenizer: Tokenizer) -> None:
    """Any text may stand around calls; what begins one has to become a valid one."""
    grammar = text_with_calls_grammar(FUNCTIONS)
    for text in ("", "Hi", "a < b <tool_cal", CALL, f"Well\n{CALL}\n{NOW} done", "</tool_call>"):
        assert matches(tokenizer, grammar, text)
    for text in (WRONG, f"Well {WRONG}", "<tool_call>", f"{CALL} and <tool_call> so"):
        assert not matches(tokenizer, grammar, text)


def test_arguments_are_an_object() -> None:
    """Another schema is refused, naming the function."""
    for schema in ({}, {"type": "string"}, {"type": ["object"]}):
        with pytest.raises(InvalidRequest, match=r"tools: the type of the parameters of f is not"):
            calls_grammar({"f": schema}, several=True)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_told_from_text_however_it_is_cut(size: int) -> None:
    """Text, calls and what is none come out the same from pieces of any size."""
    written = f"Well <tool \n{CALL}\n{NOW}\n <tool_call>no call</tool_call> and <tool_cal"
    reader = ToolCallReader(FUNCTIONS)
    found = [
        piece
        for start in range(0, len(written), size)
        for piece in reader.push(written[start : start + size])
    ]
    found += reader.finish()
    calls = [piece for piece in found if isinstance(piece, ToolCall)]
    text = "".join(piece for piece in found if isinstance(piece, str))
    assert calls == [PARSED, ToolCall("now", {})]
    assert text == "Well <tool<tool_call>no call</tool_call> and <tool_cal"
    assert reader.num_calls == 2


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "{",
        "[]",
        "1",
        "{}",
        '{"name": "weather"}',
        '{"name": "other", "arguments": {}}',
        '{"name": ["weather"], "arguments": {}}',
        '{"name": "weather", "arguments": []}',
        '{"name": "weather", "arguments": {"a": NaN}}',
        '{"name": "weather", "arguments": {}, "more": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_call_is_text(inside: str) -> None:
    """Nothing that was written is lost, whatever it is."""
    for end in ("</tool_call>", ""):
        reader = ToolCallReader(FUNCTIONS)
        written = f"<tool_call>{inside}{end}"
        found = [*reader.push(written), *reader.finish()]
        assert found == [written]
        assert reader.num_calls == 0


def test_a_call_may_end_with_the_answer() -> None:
    """Its end tag was a stop, or is still to come: it is a call all the same."""
    reader = ToolCallReader(FUNCTIONS)
    assert reader.push(CALL.removesuffix("</tool_call>")) == []
    assert reader.finish() == [PARSED]


def test_templates_without_tools_or_of_another_format() -> None:
    """Each is refused for its own reason."""
    for template, problem in (
        (None, "has none"),
        ("{{ tools }}[TOOL_CALLS]", "a format not known"),
        ("{{ tools }}<tool_call><function=f>", "a format not known"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            check_template(template)


async def test_a_call_is_in_its_place(tokenizer: Tokenizer) -> None:
    """Whole and streamed: the text before it, then name and arguments, and the reason."""
    async with http(tokenizer, tokenizer.encode(f"Well.\n{CALL}\n{NOW}"), max_model_len=2048) as it:
        whole = await it.chat(tools=TOOLS)
        chunks = await it.stream(tools=TOOLS)
        [first, *_] = it.wire.backend.requests
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    calls = choice["message"]["tool_calls"]
    expected = [
        {"name": "weather", "arguments": '{"city": "Rom", "temperature": 4}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert [call["function"] for call in calls] == expected
    assert len({call["id"] for call in calls}) == 2
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["delta"].get("content", "") for part in parts) == "Well."
    streamed = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert [call["function"] for call in streamed] == expected
    assert [call["index"] for call in streamed] == [0, 1]
    assert parts[-1]["finish_reason"] == "tool_calls"
    assert first.grammar is None
    assert '"name": "weather"' in tokenizer.decode(first.prompt_token_ids)


async def choose(it: Http, **fields: object) -> tuple[Grammar | None, tuple[str, ...], str]:
    """What a choice of tools means to the engine: grammar, stops and prompt."""
    await it.chat(tools=TOOLS, max_tokens=1, **fields)
    sent = it.wire.backend.requests[-1]
    prompt = it.wire.backend.requests[-1].prompt_token_ids
    return sent.grammar, sent.stopping.stop, repr(prompt)


async def test_what_a_choice_means(tokenizer: Tokenizer) -> None:
    """A grammar wherever a call is forced or strict; without tools the prompt says nothing."""
    named = {"type": "function", "function": {"name": "now"}}
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]  # type: ignore[operator]
    async with http(tokenizer, tokenizer.encode("a"), max_model_len=2048) as it:
        auto = await choose(it)
        assert auto[:2] == (None, ())
        assert await choose(it, tool_choice="auto") == auto
        one_at_most = await choose(it, parallel_tool_calls=False)
        assert one_at_most[:2] == (None, ("</tool_call>",))
        required = await choose(it, tool_choice="required")
        assert required[0] == calls_grammar(FUNCTIONS, several=True)
        exactly_one = await choose(it, tool_choice="required", parallel_tool_calls=False)
        assert exactly_one[0] == calls_grammar(FUNCTIONS, several=False)
        assert (await choose(it, tool_choice=named))[0] == calls_grammar(
            {"now": None}, several=False
        )
        none = await choose(it, tool_choice="none")
        await it.chat(max_tokens=1)
        assert none[2] == repr(it.wire.backend.requests[-1].prompt_token_ids) != auto[2]
        await it.chat(tools=strict, max_tokens=1)
        sent = it.wire.backend.requests[-1]
        assert sent.grammar == text_with_calls_grammar({"weather": WEATHER})
        assert "strict" not in tokenizer.decode(sent.prompt_token_ids)


async def test_results_go_back_through_the_template(tokenizer: Tokenizer) -> None:
    """An earlier call with its arguments, then what it gave."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    async with http(tokenizer) as it:
        await it.chat(messages=turns)
        [sent] = it.wire.backend.requests
    prompt = tokenizer.decode(sent.prompt_token_ids)
    assert '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert "tool\nnoon" in prompt


async def test_what_does_not_belong_together_is_refused(
    tokenizer: Tokenizer, plain: Tokenizer
) -> None:
    """By the field that is one too many."""
    named = {"type": "function", "function": {"name": "other"}}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{"}}
    result = {"role": "tool", "tool_call_id": "1", "content": ""}
    schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}}
    bad_tool = {"type": "function", "function": schema}
    wrong = (
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": TOOLS, "tool_choice": named}, "tool_choice.function.name"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": TOOLS[:1] * 129}, "tools"),
        ({"tools": [bad_tool], "tool_choice": "required"}, "tools"),
        ({"messages": [*ASK, result]}, "messages[1].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    )
    async with http(tokenizer) as it:
        for fields, param in wrong:
            status, error = await it.failure("chat/completions", {"messages": ASK} | fields)
            assert (status, error["param"]) == (400, param), error
    async with http(plain) as it:
        ok = call | {"function": {"name": "now", "arguments": "{}"}}
        turns = [*ASK, {"role": "assistant", "tool_calls": [ok]}]
        for fields, param in (({"tools": TOOLS}, "tools"), ({"messages": turns}, "messages[1]")):
            status, error = await it.failure("chat/completions", {"messages": ASK} | fields)
            assert (status, error["param"]) == (400, param), error
        assert (await it.chat(tools=TOOLS, tool_choice="none"))["choices"]


async def test_a_template_that_fails_refuses(tmp_path: Path) -> None:
    """Whatever it fails with on a conversation it was not written for, it is no fault of ours."""
    for number, template in enumerate(
        (
            "{{ raise_exception('no') }}",
            "{{ 1 + messages[0].content }}",
            "{{ messages[0].content | int(0) / 0 }}",
            "{{ messages[0].nothing.at.all }}",
            "{% for i in range(10**9) %}{% endfor %}",
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with http(tokenizer_with_tools(folder, template)) as it:
            status, error = await it.failure("chat/completions", {"messages": ASK})
        assert (status, error["param"]) == (400, "messages"), template
