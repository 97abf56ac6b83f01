"""Log-probabilities in the two shapes that OpenAI gives them."""

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.messages import TopLogprobs
from cluster.text.detokenizer import Detokenizer, Vocabulary


class Tokens:
    """What tokens look like in an answer, for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; those of its name if it gives no text."""
        tokens = self._vocabulary.tokens
        token = tokens[token_id] if token_id < len(tokens) else None
        if token is None:
            return b""
        if token_id in self._vocabulary.special_token_ids:
            return token.encode()
        return self._vocabulary.decoding.piece(token)

    def name(self, token_id: int) -> str:
        """Its text, or its bytes written out where they are not text by themselves."""
        piece = self.bytes_of(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def chat(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[TopLogprobs],
    ) -> dict[str, Any]:
        """One entry for each token, with the most probable ones if they were asked for."""
        tops: Iterable[TopLogprobs] = top_logprobs or ((),) * len(token_ids)
        content = [
            {
                **self._entry(token_id, logprob),
                "top_logprobs": [self._entry(*other) for other in top],
            }
            for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        top_logprobs: Sequence[TopLogprobs],
        text_offset: Sequence[int],
    ) -> dict[str, Any]:
        """Lists with an entry for each token; an offset is where its text begins, in characters.

        Of tokens that have one name in a position the most probable stands for all.
        """
        names = [self.name(token_id) for token_id in token_ids]
        return {
            "tokens": names,
            "token_logprobs": list(logprobs),
            "top_logprobs": [self._by_name(top) for top in top_logprobs] or None,
            "text_offset": list(text_offset),
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": logprob,
            "bytes": list(self.bytes_of(token_id)),
        }

    def _by_name(self, top: TopLogprobs) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in top:
            named.setdefault(self.name(token_id), logprob)
        return named


class Offsets:
    """Where the text of each token begins, in one text that comes token by token."""

    def __init__(self, vocabulary: Vocabulary, start: int = 0) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._next = start

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """One number of characters for each token: those that the tokens before it completed."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            self._next += len(self._detokenizer.push(token_id))
        return offsets
