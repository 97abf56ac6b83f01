"""Which blocks of the target's KV memory belong to which sequence.

block_size 4, a sequence of 6 tokens:   table (7, 2)
block 7: [t0 t1 t2 t3]    block 2: [t4 t5 .. ..]
"""

from cluster.errors import OutOfBlocks


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens; a block has one owner or none."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(reversed(range(num_blocks)))  # a stack: block 0 goes first
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def table(self, seq_id: int) -> tuple[int, ...]:
        """The sequence's blocks in the order of its positions; empty if it has none."""
        return tuple(self._tables.get(seq_id, ()))

    def max_length(self, seq_id: int) -> int:
        """The most tokens `allocate` could hold for the sequence now."""
        return (len(self._tables.get(seq_id, ())) + len(self._free)) * self._block_size

    def allocate(self, seq_id: int, length: int) -> None:
        """Give the sequence blocks for `length` tokens; never takes any away.

        Raises OutOfBlocks, and then nothing has changed.
        """
        held = len(self._tables.get(seq_id, ()))
        needed = self._blocks_for(length) - held
        if needed > len(self._free):
            raise OutOfBlocks(needed=needed, free=len(self._free))
        if needed > 0:
            table = self._tables.setdefault(seq_id, [])
            table.extend(self._free.pop() for _ in range(needed))

    def truncate(self, seq_id: int, length: int) -> None:
        """Take back the blocks that lie wholly past the first `length` tokens."""
        table = self._tables.get(seq_id, [])
        while len(table) > self._blocks_for(length):
            self._free.append(table.pop())

    def free(self, seq_id: int) -> None:
        """Take back all blocks of the sequence, if it has any."""
        self._free.extend(reversed(self._tables.pop(seq_id, [])))

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_size)
