"""What the benchmarks ask: built-in prompts, or a file that is read where it lies."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

from cluster.errors import ConfigurationError
from cluster.text.tokenizer import ChatMessage, Tokenizer
from cluster.tools.bench.prompts import CHAT, CODE, COPY, MATH

T = TypeVar("T")

Prompt = str | tuple[ChatMessage, ...]  # plain text to go on with, or a conversation to answer


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts under one name, in the order in which they are asked."""

    name: str
    prompts: tuple[Prompt, ...]

    def token_ids(self, tokenizer: Tokenizer, num_prompts: int) -> list[tuple[int, ...]]:
        """The first `num_prompts` prompts; a workload with fewer starts again."""
        found = [encoded(prompt, tokenizer) for prompt in self.prompts[:num_prompts]]
        return [found[number % len(found)] for number in range(num_prompts)]


def parse_workload(text: str) -> Workload:
    """What `--workload copy|code|chat|math|spec_bench:PATH|jsonl:PATH` names.

    Raises ConfigurationError, which for a file names the line.
    """
    if text in BUILT_IN:
        return Workload(text, tuple(map(_question, BUILT_IN[text])))
    kind, _, path = text.partition(":")
    if kind not in READERS or not path:
        known = ", ".join((*BUILT_IN, *(f"{reader}:PATH" for reader in READERS)))
        raise ConfigurationError(f"workload {text!r} is none of {known}")
    prompts = READERS[kind](Path(path))
    if not prompts:
        raise ConfigurationError(f"{path}: no prompts")
    return Workload(kind, tuple(prompts))


def by_category(path: Path | None, *, category_field: str) -> dict[str, list[Prompt]]:
    """The prompts of a file by what a field of each line says, or the built-in ones by workload.

    Lines are of {"turns": [text, ...]}, of which the first turn counts, or as `jsonl:PATH` has
    them. A line without the field is of category "all". Raises ConfigurationError naming the line.
    """
    if path is None:
        return {name: list(map(_question, texts)) for name, texts in BUILT_IN.items()}
    found: dict[str, list[Prompt]] = defaultdict(list)
    for line in _lines(path):
        category = line.data.get(category_field, "all")
        if not isinstance(category, str):
            raise line.wrong(f"{category_field} is not a text")
        found[category].append(_question(_turn(line)) if "turns" in line.data else _prompt(line))
    if not found:
        raise ConfigurationError(f"{path}: no prompts")
    return dict(found)


def _spec_bench(path: Path) -> list[Prompt]:
    """First turns of a Spec-Bench question.jsonl, one of each category after another.

    (The file has one category after another, so its beginning alone would be of one kind.)
    """
    categories: dict[str, list[Prompt]] = defaultdict(list)
    for line in _lines(path):
        categories[line.field("category", str)].append(_question(_turn(line)))
    rounds = zip_longest(*categories.values())
    return [prompt for prompt in chain.from_iterable(rounds) if prompt is not None]


def _turn(line: "_Line") -> str:
    """The first turn of a conversation."""
    turns = line.field("turns", list)
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise line.wrong("turns is not a list of texts")
    return str(turns[0])


def _jsonl(path: Path) -> list[Prompt]:
    """Lines of {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]}."""
    return [_prompt(line) for line in _lines(path)]


def _prompt(line: "_Line") -> Prompt:
    """A text or a conversation."""
    if "prompt" in line.data and "messages" in line.data:
        raise line.wrong("prompt and messages are both there")
    prompt: Prompt
    if "messages" in line.data:
        prompt = tuple(_message(line, item) for item in line.field("messages", list))
    else:
        prompt = line.field("prompt", str)
    if not prompt:
        raise line.wrong("nothing to answer")
    return prompt


BUILT_IN: dict[str, Sequence[str]] = {"copy": COPY, "code": CODE, "chat": CHAT, "math": MATH}
READERS: dict[str, Callable[[Path], list[Prompt]]] = {"spec_bench": _spec_bench, "jsonl": _jsonl}


@dataclass(frozen=True, slots=True)
class _Line:
    """One object of a file of JSON lines."""

    path: Path
    number: int
    data: dict[str, object]

    def field(self, name: str, kind: type[T]) -> T:
        """A field that must be there and of that type. Raises ConfigurationError."""
        value = self.data.get(name)
        if not isinstance(value, kind):
            raise self.wrong(f"{name} is missing or not a {kind.__name__}")
        return value

    def wrong(self, problem: str) -> ConfigurationError:
        """An error that names the file and the line."""
        return ConfigurationError(f"{self.path}: line {self.number}: {problem}")


def _lines(path: Path) -> list[_Line]:
    """The objects of a file of JSON lines; empty lines are passed over."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return [
        _Line(path, number, _object(path, number, line))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _object(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: line {number}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: line {number}: not an object")
    return data


def _message(line: _Line, item: object) -> ChatMessage:
    match item:
        case {"role": str(role), "content": str(content)}:
            return ChatMessage(role=role, content=content)
    raise line.wrong("a message needs a role and a content, both texts")


def _question(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=text),)


def encoded(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """A prompt's tokens, as the model is to be given it."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.chat(prompt)
