"""Keys and values of all sequences, in blocks of slots. A slot holds one position of all layers.

Truncating a sequence takes no work: positions from `start` on are overwritten by the rows that
next claim to start there, and a row never sees a position after its own.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from cluster.messages import BlockCopy
from cluster.models.spec import ModelSpec

KEY_CHUNK = 64  # keys are attended to in multiples of this many


class Computes(Protocol):
    """What fills a cache: a decoder."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """`num_blocks` blocks of `block_size` positions each.

    `layers[i]` is `[num_slots, 2 * num_kv_heads, head_dim]`: a slot's keys, then its values.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A block that spans whole chunks is read in place: pad it, so that reading up to the end
        # of a chunk stays inside the block.
        self.block_stride = (
            round_up(block_size, KEY_CHUNK) if block_size >= KEY_CHUNK else block_size
        )
        self.layers = torch.zeros(
            (
                spec.num_layers,
                num_blocks * self.block_stride,
                2 * spec.num_kv_heads,
                spec.head_dim,
            ),
            dtype=dtype,
            device=device,
        )

    @classmethod
    def of(cls, decoder: Computes, *, num_blocks: int, block_size: int) -> Self:
        """Memory for what a decoder computes, in its dtype and on its device."""
        return cls(
            decoder.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    def slots(self, block_table: Sequence[int], start: int, stop: int) -> list[int]:
        """The slots of positions start..stop-1."""
        size, stride = self.block_size, self.block_stride
        return [block_table[p // size] * stride + p % size for p in range(start, stop)]

    def copy(self, copy: BlockCopy) -> None:
        """Copy the first slots of one block to another, in all layers."""
        source, target = copy.source * self.block_stride, copy.target * self.block_stride
        self.layers[:, target : target + copy.num_tokens] = self.layers[
            :, source : source + copy.num_tokens
        ]

    def write_noise(self, block_table: Sequence[int], num_tokens: int) -> None:
        """Put noise at the first positions, the same in every layer, as if they were computed."""
        shape = (num_tokens, *self.layers.shape[2:])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self.layers[:, self.slots(block_table, 0, num_tokens)] = noise.to(self.layers)

    def contiguous_from(self, block_table: Sequence[int], num_keys: int) -> int | None:
        """The slot of position 0 if `num_keys` slots from there on are the sequence's own."""
        # Past the end of a block comes padding: it may be read, but only when nothing else is due.
        room = self.block_stride if len(block_table) == 1 else self.block_size
        return block_table[0] * self.block_stride if num_keys <= room else None


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple
