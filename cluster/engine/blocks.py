"""Which blocks of the target's KV memory are used by which sequence.

block_size 4, a sequence of 10 tokens, 6 of them settled:

    table   7            2            5
            [t0 .. t3]   [t4 t5 .. .. [.. .. .. ..
    path    a full node  a tail       not settled: nobody else's business

Settled is what is committed and computed. A block of the path that is full may be in the tables of
several sequences; all other blocks of a table are in no other.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from cluster.engine.prefix_cache import Node, PrefixCache
from cluster.errors import OutOfBlocks
from cluster.messages import BlockCopy


@dataclass(slots=True)
class _Holding:
    """A sequence's blocks in the order of its positions, and the nodes of the settled ones."""

    salt: str = ""
    table: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    num_settled: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence need not compute, once the copy, if one is needed, is made."""

    num_tokens: int = 0
    copies: tuple[BlockCopy, ...] = ()


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens, and keeps what they held for others.

    Copies are to be made in the order they are asked for, before any row is computed: the source
    of one may be the target of a later one. Without `reuse` nothing is settled or shared.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        self._block_size = block_size
        self._reuse = reuse
        self._free = list(reversed(range(num_blocks)))  # a stack: block 0 goes first
        self._holdings: dict[int, _Holding] = {}
        self._cache = PrefixCache(block_size)

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses, those that are kept for their tokens included."""
        return len(self._free) + self._cache.num_idle

    def prefixes(self, most: int) -> frozenset[int]:
        """Digests of the prefixes that are settled, the first blocks' first; about `most`."""
        return self._cache.digests(most)

    def table(self, seq_id: int) -> tuple[int, ...]:
        """The sequence's blocks in the order of its positions; empty if it has none."""
        holding = self._holdings.get(seq_id)
        return tuple(holding.table) if holding else ()

    def max_length(self, seq_id: int) -> int:
        """The most tokens `allocate` could hold for the sequence now."""
        return (len(self.table(seq_id)) + self.num_free) * self._block_size

    def fits(
        self, token_ids: list[int], *, salt: str, limit: int, without: Collection[int] = ()
    ) -> bool:
        """Whether `admit` would find room if the sequences `without` had been freed before."""
        match = self._cache.find(salt, token_ids, limit)
        dropped: Counter[Node] = Counter()
        num_free = self.num_free
        for seq_id in without:
            holding = self._holdings[seq_id]
            dropped.update(holding.path)
            num_free += len(holding.table) - len(holding.path)
        num_free += sum(node.holders == count for node, count in dropped.items())
        shared = sum(node.holders > dropped[node] for node in match.path)
        return self._blocks_for(len(token_ids)) - shared <= num_free

    def admit(self, seq_id: int, token_ids: list[int], *, salt: str, limit: int) -> Prefix:
        """Give a new sequence blocks for all its tokens, with at most `limit` of them settled.

        The longest settled prefix of the same salt is shared, taken over or copied. Raises
        OutOfBlocks, and then nothing has changed.
        """
        if not self.fits(token_ids, salt=salt, limit=limit):
            raise OutOfBlocks(needed=self._blocks_for(len(token_ids)), free=self.num_free)
        match = self._cache.find(salt, token_ids, limit)
        holding = self._holdings[seq_id] = _Holding(salt)
        for node in match.path:
            self._take_over(holding, node)
        copied = match.tail
        if copied is not None and match.adopts:
            self._take_over(holding, copied)
            copied = None
        elif copied is not None:
            self._cache.touch(copied)
        self.allocate(seq_id, len(token_ids))
        copies: tuple[BlockCopy, ...] = ()
        if copied is not None:
            target = holding.table[len(match.path)]
            # The block may have been evicted for this very sequence. It still holds the tokens.
            if copied.block != target:
                copies = (BlockCopy(copied.block, target, match.num_tail),)
        num_tokens = len(match.path) * self._block_size + match.num_tail
        self.settle(seq_id, token_ids, num_tokens)
        return Prefix(num_tokens, copies)

    def allocate(self, seq_id: int, length: int) -> None:
        """Give the sequence blocks for `length` tokens; never takes any away.

        Raises OutOfBlocks, and then nothing has changed.
        """
        needed = self._blocks_for(length) - len(self.table(seq_id))
        if needed > self.num_free:
            raise OutOfBlocks(needed=needed, free=self.num_free)
        if needed > 0:
            table = self._holdings.setdefault(seq_id, _Holding()).table
            table.extend(self._take() for _ in range(needed))

    def settle(self, seq_id: int, token_ids: list[int], length: int) -> None:
        """Let others use the first `length` tokens: they are committed, computed and final."""
        if not self._reuse:
            return
        holding = self._holdings[seq_id]
        while holding.num_settled < length:
            index, num_filled = divmod(holding.num_settled, self._block_size)
            if num_filled == 0:
                parent = holding.path[-1] if holding.path else None
                holding.path.append(
                    self._cache.open_tail(holding.salt, parent, holding.table[index])
                )
            tail = holding.path[-1]
            stop = min(length, (index + 1) * self._block_size)
            tail.token_ids.extend(token_ids[holding.num_settled : stop])
            holding.num_settled = stop
            if len(tail.token_ids) == self._block_size:
                self._share(holding, tail)

    def truncate(self, seq_id: int, length: int) -> None:
        """Take back the blocks that lie wholly past the first `length` tokens.

        What is settled is not taken back.
        """
        holding = self._holdings.get(seq_id, _Holding())
        while len(holding.table) > max(self._blocks_for(length), len(holding.path)):
            self._free.append(holding.table.pop())

    def free(self, seq_id: int) -> None:
        """Take back all blocks of the sequence, if it has any; the settled ones for later use."""
        holding = self._holdings.pop(seq_id, _Holding())
        self._free.extend(reversed(holding.table[len(holding.path) :]))
        self._free.extend(self._cache.drop(holding.path))

    def _take(self) -> int:
        """A block for new tokens."""
        return self._free.pop() if self._free else self._cache.evict()

    def _take_over(self, holding: _Holding, node: Node) -> None:
        """Put a settled block at the end of the sequence's own."""
        self._cache.hold(node)
        holding.table.append(node.block)
        holding.path.append(node)
        holding.num_settled += len(node.token_ids)

    def _share(self, holding: _Holding, tail: Node) -> None:
        """A block has become full: others may use it, or all use the one that was full before."""
        node = self._cache.close_tail(tail)
        if node is not tail:
            holding.path[-1] = node
            holding.table[len(holding.path) - 1] = node.block
            self._free.append(tail.block)

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_size)
