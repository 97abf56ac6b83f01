"""Keys and values of all sequences, in blocks of slots. A slot holds one position of all layers.

Truncating a sequence takes no work: positions from `start` on are overwritten by the rows that
next claim to start there, and a row never sees a position after its own.
"""

from collections.abc import Sequence

import torch

from cluster.models.spec import ModelSpec

KEY_CHUNK = 64  # keys are attended to in multiples of this many


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

    def slots(self, block_table: Sequence[int], start: int, stop: int) -> list[int]:
        """The slots of positions start..stop-1."""
        size, stride = self.block_size, self.block_stride
        return [block_table[p // size] * stride + p % size for p in range(start, stop)]

    def contiguous_from(self, block_table: Sequence[int], num_keys: int) -> int | None:
        """The slot of position 0 if `num_keys` slots from there on are the sequence's own."""
        return block_table[0] * self.block_stride if num_keys <= self.block_stride else None


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple
