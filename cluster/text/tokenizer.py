"""Text to token ids and back, for one model's tokenizer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from cluster.errors import ConfigurationError, InvalidRequest
from cluster.text.decoding import parse_decoding
from cluster.text.detokenizer import Detokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Safe to use from several threads.

    Build it with `load_tokenizer`; `tokenizer` is transformers' own, of the fast kind.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        decoder: Mapping[str, Any] | None = json.loads(self._backend.to_str())["decoder"]
        self.vocabulary = Vocabulary(
            tokens=_tokens(self._backend.get_vocab(with_added_tokens=True)),
            special_token_ids=frozenset(key for key, token in added.items() if token.special),
            decoding=parse_decoding(decoder),
        )

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
        return tuple(self._backend.encode(text, add_special_tokens=True).ids)

    def chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the model's next turn begins.

        Raises InvalidRequest when the template refuses the conversation, or there is none.
        """
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("messages", "this model has no chat template; send prompt instead")
        try:
            text = self._tokenizer.apply_chat_template(
                [asdict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError as error:
            raise InvalidRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

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


def _tokens(ids: Mapping[str, int]) -> tuple[str | None, ...]:
    """Every token at the place of its id; ids may have holes."""
    tokens: list[str | None] = [None] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    return tuple(tokens)
