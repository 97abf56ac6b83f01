"""Noise that target and drafter can both compute: a function of where, never of when or with whom.

Every (seed, absolute position, stream, token id) owns one uniform number. The hash is SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): seed, position and
stream are mixed into the start of a row's sequence, and the token id is the index into it. It is
integer arithmetic only, so it gives the same bits on every device.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor


class Stream(IntEnum):
    """Independent uses of noise at one position."""

    TOKEN = 0  # one number per individually weighed token
    REST = 1  # one number for all other tokens together
    WITHIN_REST = 2  # one number per token, to choose among those others
    DRAFT = 3  # one number, for a drafter that draws from its own distribution
    ACCEPTANCE = 4  # one number, to keep a draft or not
    RESIDUAL = 5  # one number, for the token in place of a rejected draft
    BONUS = 6  # one number, for the token after drafts that were all kept


def row_keys(
    seeds: Sequence[int], positions: Sequence[int], stream: Stream, device: torch.device
) -> Tensor:
    """Where each row's noise starts: `[rows]` int64.

    A seed is taken modulo 2**64, so any int is one. Positions are absolute: those of the tokens
    to be drawn.
    """
    parts = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)
    keys = _mix(parts + _GOLDEN)
    keys = _mix((keys ^ torch.tensor(positions, dtype=torch.int64, device=device)) + _GOLDEN)
    return _mix((keys ^ int(stream)) + _GOLDEN)


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Uniform numbers in [2**-53, 1 - 2**-53], `[rows, n]` float64, never 0 or 1.

    `keys` is `[rows]` of `row_keys`, `token_ids` is `[rows, n]` int64. 52 bits and a half make
    every value exact: with 53 the largest would round to 1 and its Gumbel noise to infinity.
    """
    bits = _shifted(_mix(keys.unsqueeze(-1) + token_ids * _GOLDEN), 12)
    return (bits.double() + 0.5) * 2.0**-52


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, `[rows, n]` float64, always finite (from -3.7 to 36.8)."""
    return -torch.log(-torch.log(uniform(keys, token_ids)))


def number(seed: int, position: int, stream: Stream) -> float:
    """The uniform number of token id 0, for a stream that has one a position; no tensors."""
    word = _mixed(seed + _GOLDEN)
    word = _mixed((word ^ position) + _GOLDEN)
    word = _mixed(_mixed((word ^ stream) + _GOLDEN))
    return ((word >> 12) + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = _signed(0x94D049BB133111EB)
_ALL_BITS = 2**64 - 1


def _mix(words: Tensor) -> Tensor:
    """The 64-bit finaliser of SplitMix64: each input bit flips half of the output bits."""
    words = (words ^ _shifted(words, 30)) * _FIRST_FACTOR
    words = (words ^ _shifted(words, 27)) * _SECOND_FACTOR
    return words ^ _shifted(words, 31)


def _mixed(word: int) -> int:
    """The same of one word, any int, as an unsigned one."""
    word &= _ALL_BITS
    word = ((word ^ (word >> 30)) * _FIRST_FACTOR) & _ALL_BITS
    word = ((word ^ (word >> 27)) * _SECOND_FACTOR) & _ALL_BITS
    return word ^ (word >> 31)


def _shifted(words: Tensor, count: int) -> Tensor:
    """A right shift that brings in zeros: torch's own brings in the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)
