"""Blocks have one owner or none, and all come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.blocks import BlockManager
from cluster.errors import OutOfBlocks


def test_a_table_covers_the_length_and_no_block_more() -> None:
    """A sequence of 5 tokens in blocks of 4 holds two."""
    blocks = BlockManager(4, 4)
    blocks.allocate(1, 5)
    assert len(blocks.table(1)) == 2
    assert blocks.num_free == 2
    assert blocks.max_length(1) == 16


def test_allocating_less_than_is_held_takes_nothing_away() -> None:
    """`allocate` only grows; `truncate` only shrinks."""
    blocks = BlockManager(4, 4)
    blocks.allocate(1, 12)
    table = blocks.table(1)
    blocks.allocate(1, 3)
    assert blocks.table(1) == table
    blocks.truncate(1, 100)
    assert blocks.table(1) == table


def test_truncate_keeps_the_block_that_is_half_full() -> None:
    """A block goes back only when none of its tokens is kept, and the rest keep their order."""
    blocks = BlockManager(4, 4)
    blocks.allocate(1, 12)
    table = blocks.table(1)
    blocks.truncate(1, 5)
    assert blocks.table(1) == table[:2]
    assert blocks.num_free == 2


def test_without_room_nothing_changes_and_the_error_says_the_numbers() -> None:
    """OutOfBlocks leaves the sequence as it was."""
    blocks = BlockManager(3, 4)
    blocks.allocate(1, 4)
    blocks.allocate(2, 4)
    with pytest.raises(OutOfBlocks) as caught:
        blocks.allocate(2, 13)
    assert (caught.value.needed, caught.value.free) == (3, 1)
    assert len(blocks.table(2)) == 1
    assert blocks.num_free == 1


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "truncate", "free"]), st.integers(0, 3), st.integers(0, 30)
    ),
    max_size=40,
)


@given(_OPERATIONS, st.integers(1, 5))
def test_blocks_are_never_shared_and_never_lost(
    operations: list[tuple[str, int, int]], block_size: int
) -> None:
    """After any calls the tables are disjoint, and with the free blocks they are all blocks."""
    blocks = BlockManager(8, block_size)
    for name, seq_id, length in operations:
        if name == "free":
            blocks.free(seq_id)
        elif name == "truncate":
            blocks.truncate(seq_id, length)
        else:
            fits = length <= blocks.max_length(seq_id)
            try:
                blocks.allocate(seq_id, length)
            except OutOfBlocks:
                assert not fits
            else:
                assert fits
                assert len(blocks.table(seq_id)) * block_size >= length
        owned = [block for seq_id in range(4) for block in blocks.table(seq_id)]
        assert len(set(owned)) == len(owned)
        assert len(owned) + blocks.num_free == 8
    for seq_id in range(4):
        blocks.free(seq_id)
    assert blocks.num_free == 8
