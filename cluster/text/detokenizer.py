"""Token ids to text as they come, at a cost that depends on the new tokens only."""

import codecs
from dataclasses import dataclass

from cluster.text.decoding import Decoding


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What every token id means. A special token gives no text."""

    tokens: tuple[str | None, ...]
    special_token_ids: frozenset[int]
    decoding: Decoding

    def token(self, token_id: int) -> str | None:
        """The token that gives text, or None: special, or an id beyond the vocabulary."""
        if token_id >= len(self.tokens) or token_id in self.special_token_ids:
            return None
        return self.tokens[token_id]


class Detokenizer:
    """The text of one sequence of tokens, each character with the token that completes it.

    Joined, the pieces are what decoding all token ids at once gives, with special tokens left
    out, but for this: bytes at the very end that are not a whole character yet are not text.
    Decoding at once shows them as U+FFFD; here they are held back and never come out, so that a
    stream has no character in it that the model did not write. Bytes in the middle that can never
    become a character are one U+FFFD for each maximal run, as everywhere in Unicode. (For
    SentencePiece's byte tokens, decoding at once spoils whole characters that share a run with
    such bytes; here they are kept.)
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._piece = vocabulary.decoding.first_piece
        self._num_to_strip = vocabulary.decoding.num_stripped_spaces

    def push(self, token_id: int) -> str:
        """The characters this token completes; empty when there are none yet."""
        token = self._vocabulary.token(token_id)
        if token is None:
            return ""
        text = self._decoder.decode(self._piece(token))
        self._piece = self._vocabulary.decoding.piece
        return self._stripped(text) if self._num_to_strip else text

    def _stripped(self, text: str) -> str:
        """Leave out the spaces that belong to the start of the text."""
        while self._num_to_strip and text.startswith(" "):
            text = text[1:]
            self._num_to_strip -= 1
        if text:
            self._num_to_strip = 0
        return text
