"""Tool calls as a model writes them: the grammar that makes it call, and reading what it wrote.

The one format that is known is that of Hermes and Qwen, `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, each call on lines of its own.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from cluster.errors import InvalidRequest
from cluster.grammar.compiler import WHITE_SPACE
from cluster.request import Grammar, GrammarKind
from cluster.text.tokenizer import ToolCall

BEGIN, END = "<tool_call>", "</tool_call>"
OTHER_FORMATS = ("<function=",)  # inside the same tags, by some models
MAX_CALLS = 16
MAX_TOOLS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def check_template(template: str | None) -> None:
    """Raises InvalidRequest where the model has no tools, or writes calls in an unknown way."""
    if template is None:
        raise InvalidRequest("tools", "this model's chat template has none")
    if BEGIN not in template or any(mark in template for mark in OTHER_FORMATS):
        raise InvalidRequest("tools", "this model writes tool calls in a format not known here")


Functions: TypeAlias = Mapping[str, Mapping[str, Any] | None]  # schemas of arguments, by name


def calls_grammar(functions: Functions, *, several: bool) -> Grammar:
    """Text that is calls of these functions and nothing else.

    Raises InvalidRequest for a schema that is not one of an object.
    """
    more = rf' ("\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
    lines = [f"start: call{more}", f"call: {json.dumps(BEGIN)} body", *_body(functions)]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def text_with_calls_grammar(functions: Functions) -> Grammar:
    """Any text, in which every call is one of these functions. Raises InvalidRequest as above."""
    lines = [
        "start: (to_call body)* TEXT?",
        f"to_call[lazy]: /(?s:.*){BEGIN}/",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){BEGIN}(?s:.*)/",
        *_body(functions),
    ]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


class ToolCallReader:
    """Takes the text of one answer in pieces, and tells calls of known functions from text.

    White space around calls belongs to them. What looks like a call and is none stays text.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._inside = False
        self._searched = 0  # characters of `_held` in which no END begins
        self.num_calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain by now."""
        self._held += text
        found: list[str | ToolCall] = []
        while (piece := self._call() if self._inside else self._text()) is not None:
            found += piece
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest, at the end of the answer; a call may end with it, without its END."""
        held, self._held = self._held, ""
        if self._inside:
            call = self._parsed(held)
            return [BEGIN + held] if call is None else [call]
        return [held] if held and not (self.num_calls and held.isspace()) else []

    def _text(self) -> list[str | ToolCall] | None:
        """Text up to the next call, or as much as cannot belong to one; None when there is none."""
        text, begin, rest = self._held.partition(BEGIN)
        if begin:
            self._held, self._inside, self._searched = rest, True, 0
            text = text.rstrip()
            return [text] if text else []
        keep = next(
            (
                n
                for n in range(min(len(BEGIN) - 1, len(text)), 0, -1)
                if BEGIN.startswith(text[-n:])
            ),
            0,
        )
        certain = text[: len(text) - keep].rstrip()
        if not certain:
            return None
        self._held = text[len(certain) :]
        return [certain]

    def _call(self) -> list[str | ToolCall] | None:
        """The call that has ended, or None."""
        place = self._held.find(END, self._searched)
        if place < 0:
            self._searched = max(0, len(self._held) - len(END) + 1)
            return None
        written, self._held = self._held[:place], self._held[place + len(END) :]
        self._inside = False
        call = self._parsed(written)
        return [BEGIN + written + END] if call is None else [call]

    def _parsed(self, written: str) -> ToolCall | None:
        try:
            call = json.loads(written)
            json.dumps(call, allow_nan=False)
        except (ValueError, RecursionError):
            return None
        match call:
            case {"name": str(name), "arguments": dict(arguments), **more}:
                if more or name not in self._names:
                    return None
            case _:
                return None
        self.num_calls += 1
        return ToolCall(name, arguments)


def _body(functions: Functions) -> list[str]:
    """The lines of a Lark grammar that say what stands between BEGIN and the end of END."""
    begin, end = json.dumps('\n{"name": '), json.dumps(f"}}\n{END}")
    tools = " | ".join(f"tool{place}" for place in range(len(functions)))
    lines = [f"body: {begin} ({tools}) {end}"]
    for place, (name, schema) in enumerate(functions.items()):
        named = json.dumps(f'{json.dumps(name)}, "arguments": ')
        lines += [
            f"tool{place}: {named} arguments{place}",
            f"arguments{place}: %json {_embedded(name, schema)}",
        ]
    return lines


def _embedded(name: str, schema: Mapping[str, Any] | None) -> str:
    """A schema inside a Lark grammar.

    Line breaks and escapes keep its text apart from the grammar's own options, which are refused.
    """
    given = NO_ARGUMENTS if schema is None else schema
    if given.get("type") != "object":
        raise InvalidRequest("tools", f'the type of the parameters of {name} is not "object"')
    written = json.dumps({**given, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}, indent=0)
    return STRING.sub(
        lambda match: match[0].replace("[", r"\u005b").replace("<", r"\u003c"), written
    )


def check_names(functions: Sequence[str]) -> None:
    """Raises InvalidRequest for more functions than the limit, or a name that comes twice."""
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest("tools", f"{len(functions)} are over the limit of {MAX_TOOLS}")
    for place, name in enumerate(functions):
        if name in functions[:place]:
            raise InvalidRequest(f"tools[{place}].function.name", f"{name} is there twice")
