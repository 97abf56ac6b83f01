"""What a prompt begins with, told in numbers: who holds which prefixes is known without the text.

A digest stands for all tokens up to a multiple of DIGEST_TOKENS, and for the salt they are shared
under. Two prefixes of one digest are taken to be equal: a wrong guess costs a prompt's time, and
the engine itself compares tokens.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

DIGEST_TOKENS = 32
MOST_DIGESTS = 256  # of one prompt; what comes after them is not looked at


class Chain:
    """Takes tokens in and gives the digests of their prefixes. A copy goes on by itself."""

    def __init__(self, salt: str) -> None:
        self._state = blake2b(salt.encode(), digest_size=8).digest()
        self._left: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """The digests of the prefixes that are whole now and were not before."""
        tokens = [*self._left, *token_ids]
        digests = []
        for stop in range(DIGEST_TOKENS, len(tokens) + 1, DIGEST_TOKENS):
            chunk = array("q", tokens[stop - DIGEST_TOKENS : stop])
            self._state = blake2b(self._state + chunk.tobytes(), digest_size=8).digest()
            digests.append(int.from_bytes(self._state))
        self._left = tokens[len(digests) * DIGEST_TOKENS :]
        return digests


def prefix_digests(token_ids: Sequence[int], *, salt: str = "") -> tuple[int, ...]:
    """The digests of a prompt's prefixes, shortest first, at most MOST_DIGESTS."""
    tokens = tuple(islice(token_ids, MOST_DIGESTS * DIGEST_TOKENS))
    return tuple(Chain(salt).extend(tokens))
