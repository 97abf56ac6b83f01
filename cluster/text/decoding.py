"""How a token becomes bytes: the decoder of a tokenizer.json, one token at a time.

tokenizers decodes whole lists. A stream needs the bytes of each new token alone, and only three
kinds of decoder are used by decoder-only models, so each is written out here.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from cluster.errors import UnsupportedFeature

METASPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level BPE writes bytes with: printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


BYTE_OF_CHARACTER = _byte_alphabet()


class Decoding(Protocol):
    """The bytes of a token, and what is left out at the very start of a text."""

    @property
    def num_stripped_spaces(self) -> int:
        """Spaces left out at the start of a text, when it has as many."""
        ...

    def first_piece(self, token: str) -> bytes:
        """The bytes of a token that is the first of its text."""
        ...

    def piece(self, token: str) -> bytes:
        """The bytes of any later token."""
        ...


class ByteLevelDecoding:
    """GPT-2's way: every character of a token stands for one byte."""

    num_stripped_spaces = 0

    def piece(self, token: str) -> bytes:
        """A token with a character outside the alphabet, as added ones may have, is itself."""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return token.encode()

    first_piece = piece


class ByteFallbackDecoding:
    """SentencePiece's way: a mark for each space, and `<0xE4>` for a byte without a token."""

    def __init__(self, *, num_stripped_spaces: int) -> None:
        self.num_stripped_spaces = num_stripped_spaces

    def piece(self, token: str) -> bytes:
        """A byte token gives its byte; in any other, marks become spaces."""
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(METASPACE, " ").encode()

    first_piece = piece


class MetaspaceDecoding:
    """A mark for each space, and none in the first token, where the encoder may have put one."""

    num_stripped_spaces = 0

    def __init__(self, prepend_scheme: str) -> None:
        self._first_mark = " " if prepend_scheme == "never" else ""

    def piece(self, token: str) -> bytes:
        """Marks become spaces."""
        return token.replace(METASPACE, " ").encode()

    def first_piece(self, token: str) -> bytes:
        """Marks are left out where the encoder may have put one."""
        return token.replace(METASPACE, self._first_mark).encode()


def parse_decoding(decoder: Mapping[str, Any] | None) -> Decoding:
    """The decoding a tokenizer.json's `decoder` describes. Raises UnsupportedFeature."""
    steps = [] if decoder is None else [*decoder.get("decoders", (decoder,))]
    replace = {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return ByteLevelDecoding()
        case ["Metaspace"] if steps[0]["replacement"] == METASPACE:
            return MetaspaceDecoding(steps[0].get("prepend_scheme", "always"))
        case ["Replace", "ByteFallback", "Fuse"] if steps[0] == replace:
            return ByteFallbackDecoding(num_stripped_spaces=0)
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if steps[0] == replace:
            strip = steps[3]
            if strip["content"] == " " and strip["stop"] == 0:
                return ByteFallbackDecoding(num_stripped_spaces=strip["start"])
    raise UnsupportedFeature(
        "tokenizer decoder", f"{json.dumps(decoder)} is not one whose text can be streamed exactly"
    )
