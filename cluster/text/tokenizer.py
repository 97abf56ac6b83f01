"""Text to token ids and back, for one model's tokenizer."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from cluster.errors import ConfigurationError, InvalidRequest
from cluster.text.decoding import parse_decoding
from cluster.text.detokenizer import Detokenizer, Vocabulary

# A template is a program, and what it was not written for makes it fail as programs do.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model calls, with its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; only an assistant's has tool calls."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return turn


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Safe to use from several threads.

    Build it with `load_tokenizer`; `tokenizer` is transformers' own, of the fast kind.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.vocabulary = _vocabulary(self._backend)

    @property
    def num_tokens(self) -> int:
        """One more than the largest token id that has a token."""
        return len(self.vocabulary.tokens)

    @property
    def tokens(self) -> tuple[str | None, ...]:
        """Every token by its id, None where there is none: what two models must share."""
        return self.vocabulary.tokens

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with the special tokens the model wants around it."""
        return self._ids(text, add_special_tokens=True)

    def word(self, text: str) -> tuple[tuple[int, ...], ...]:
        """The token ids of a word in the middle of a text, without and with a space before it.

        A form that has no tokens is left out; forms that are the same come once.
        """
        bare = text.removeprefix(" ")
        forms = (self._within(form) for form in (bare, f" {bare}"))
        return tuple(dict.fromkeys(form for form in forms if form))

    @cached_property
    def tool_template(self) -> str | None:
        """The chat template used where tools are offered; None if it takes no tools."""
        if self._tokenizer.chat_template is None:
            return None
        template: str = self._tokenizer.get_chat_template(tools=[{}])
        return template if re.search(r"\btools\b", template) else None

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the model's next turn begins.

        `tools` are functions in OpenAI's form; offer them only where there is a `tool_template`.
        Raises InvalidRequest when the template refuses the conversation, or there is none.
        """
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("messages", "this model has no chat template; send prompt instead")
        try:
            text = self._tokenizer.apply_chat_template(
                [message.for_template() for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        return self._ids(text, add_special_tokens=False)

    def _within(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that follows a line break, so that it is not marked as a beginning.

        Where the line break's own tokens are not kept apart, those of the text by itself.
        """
        anchor = self._backend.encode("\n", add_special_tokens=False).ids
        both = self._backend.encode(f"\n{text}", add_special_tokens=False).ids
        if both[: len(anchor)] == anchor:
            return tuple(both[len(anchor) :])
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids; other threads run meanwhile, as a large prompt takes seconds.

        The library lets them for batches only, of which this is one.
        """
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoded.ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids, as a stream of the same tokens would give it."""
        detokenizer = Detokenizer(self.vocabulary)
        return "".join(map(detokenizer.push, token_ids))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a checkpoint's folder. Raises ConfigurationError."""
    # transformers pulls in torch, which a process that never loads a tokenizer can do without.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no tokenizer in {folder}: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(f"the tokenizer in {folder} has no tokenizer.json form")
    return Tokenizer(tokenizer)


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary alone of the tokenizer in a checkpoint's folder, without transformers.

    A token that only tokenizer_config.json adds is not in it. Raises ConfigurationError.
    """
    from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - as the other's

    try:
        return _vocabulary(Backend.from_file(str(folder / "tokenizer.json")))
    except Exception as error:  # the library raises no narrower one
        raise ConfigurationError(f"no tokenizer.json in {folder}: {error}") from error


def _vocabulary(backend: Any) -> Vocabulary:  # noqa: ANN401 - from transformers, without types
    """What the tokens of a tokenizer of the tokenizers library mean."""
    added = backend.get_added_tokens_decoder()
    decoder: Mapping[str, Any] | None = json.loads(backend.to_str())["decoder"]
    return Vocabulary(
        tokens=_tokens(backend.get_vocab(with_added_tokens=True)),
        special_token_ids=frozenset(key for key, token in added.items() if token.special),
        decoding=parse_decoding(decoder),
    )


def _tokens(ids: Mapping[str, int]) -> tuple[str | None, ...]:
    """Every token at the place of its id; ids may have holes."""
    tokens: list[str | None] = [None] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    return tuple(tokens)
