"""Blocks, prefix cache, truncation, preemption and abort in any order: a state machine.

Memory is modelled as what was written where. After every rule: nothing leaks, no block that is not
settled is shared, reference counts are the tables', and every settled position of every sequence
holds what it should.
"""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cluster.engine.blocks import BlockManager
from cluster.engine.prefix_cache import Branch, Node
from cluster.errors import OutOfBlocks

CONTEXT = 32
STEM = [i % 5 for i in range(CONTEXT)]


@dataclass
class Held:
    """A sequence as the engine knows it."""

    token_ids: list[int]
    salt: str
    num_computed: int


@dataclass(frozen=True)
class Cell:
    """What one slot holds: a token and all tokens before it."""

    salt: str
    prefix: tuple[int, ...]


@dataclass
class Memory:
    """The device: cells by block and slot."""

    block_size: int
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)

    def place(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        """Block and slot of a position."""
        return table[position // self.block_size], position % self.block_size


class MemoryMachine(RuleBasedStateMachine):
    """Plays an engine's calls, and checks the manager from outside and from inside."""

    sequences = Bundle("sequences")

    @initialize(
        block_size=st.sampled_from([1, 4, 8, 16, CONTEXT]),
        spare=st.integers(0, 6),
        reuse=st.sampled_from([True, True, True, False]),
    )
    def start(self, block_size: int, spare: int, reuse: bool) -> None:  # noqa: FBT001 - drawn
        """Memory for one context and a little more."""
        self.num_blocks = -(-CONTEXT // block_size) + spare
        self.blocks = BlockManager(self.num_blocks, block_size, reuse=reuse)
        self.memory = Memory(block_size)
        self.held: dict[int, Held] = {}
        self.next_id = 0

    @rule(
        target=sequences,
        num_shared=st.integers(0, 24),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        salt=st.sampled_from(["", "", "other"]),
        looks=st.booleans(),
    )
    def admit(self, num_shared: int, own: list[int], salt: str, looks: bool) -> int:  # noqa: FBT001
        """A request comes, with or without a look at what is at hand."""
        self.next_id += 1
        self._admit(self.next_id, [*STEM[:num_shared], *own], salt, looks=looks)
        return self.next_id

    @rule(seq_id=sequences, num_rows=st.integers(1, 12))
    def compute(self, seq_id: int, num_rows: int) -> None:
        """A prompt chunk."""
        if (held := self.held.get(seq_id)) is not None:
            stop = min(held.num_computed + num_rows, len(held.token_ids))
            self._write(seq_id, held.token_ids[:stop])
            held.num_computed = stop
            self._settle(seq_id)

    @rule(
        seq_id=sequences,
        drafts=st.lists(st.integers(0, 4), max_size=6),
        num_accepted=st.integers(0, 6),
        next_token=st.integers(0, 4),
    )
    def verify(self, seq_id: int, drafts: list[int], num_accepted: int, next_token: int) -> None:
        """A step with drafts: what is rejected is truncated, what is accepted settles."""
        held = self.held.get(seq_id)
        if held is None or not held.token_ids:
            return
        drafts = drafts[: CONTEXT - 1 - len(held.token_ids)]
        wanted = [*held.token_ids, *drafts]
        if len(wanted) >= CONTEXT or len(wanted) > self.blocks.max_length(seq_id):
            return
        self.blocks.allocate(seq_id, len(wanted))
        self._write(seq_id, wanted)
        num_accepted = min(num_accepted, len(drafts))
        held.num_computed = len(held.token_ids) + num_accepted
        held.token_ids += [*drafts[:num_accepted], next_token]
        self._settle(seq_id)
        if len(held.token_ids) > self.blocks.max_length(seq_id):
            self.end(seq_id)
        else:
            self.blocks.allocate(seq_id, len(held.token_ids))

    @rule(seq_id=consumes(sequences))
    def end(self, seq_id: int) -> None:
        """Finished or aborted."""
        if self.held.pop(seq_id, None) is not None:
            self.blocks.free(seq_id)

    @rule(seq_id=sequences)
    def preempt(self, seq_id: int) -> None:
        """Put back, and admitted again as far as there is room."""
        if (held := self.held.pop(seq_id, None)) is not None:
            self.blocks.free(seq_id)
            self._admit(seq_id, held.token_ids, held.salt, looks=True)

    @invariant()
    def nothing_leaks(self) -> None:
        """Blocks in use and free ones are all blocks."""
        if not hasattr(self, "blocks"):
            return
        used = {block for seq_id in self.held for block in self.blocks.table(seq_id)}
        assert len(used) + self.blocks.num_free == self.num_blocks
        idle = [node.block for node in self.blocks._cache._idle]
        assert sorted([*used, *idle, *self.blocks._free]) == list(range(self.num_blocks))

    @invariant()
    def only_full_settled_blocks_are_shared(self) -> None:
        """A block in two tables lies before the settled positions of both, whole."""
        if not hasattr(self, "blocks"):
            return
        users = Counter(block for seq_id in self.held for block in self.blocks.table(seq_id))
        for seq_id, held in self.held.items():
            for index, block in enumerate(self.blocks.table(seq_id)):
                whole = (index + 1) * self.memory.block_size <= held.num_computed
                assert users[block] == 1 or whole

    @invariant()
    def reference_counts_are_the_tables(self) -> None:
        """Every node is held by as many sequences as have its block, and is in its tree once."""
        if not hasattr(self, "blocks"):
            return
        cache = self.blocks._cache
        users = Counter(block for seq_id in self.held for block in self.blocks.table(seq_id))
        nodes = [node for root in cache._roots.values() for node in _below(root)]
        assert len({node.block for node in nodes}) == len(nodes)
        assert all(not root.is_leaf for root in cache._roots.values())
        for node in nodes:
            assert node.holders == users[node.block]
            assert (node in cache._idle) == (node.holders == 0)
            assert 0 < len(node.token_ids) <= self.memory.block_size
            assert node.is_leaf or len(node.token_ids) == self.memory.block_size

    @invariant()
    def every_computed_position_holds_what_it_should(self) -> None:
        """Whatever was copied, shared, adopted or overwritten meanwhile."""
        if not hasattr(self, "blocks"):
            return
        for seq_id, held in self.held.items():
            table = self.blocks.table(seq_id)
            for position in range(min(held.num_computed, len(held.token_ids))):
                expected = Cell(held.salt, tuple(held.token_ids[: position + 1]))
                assert self.memory.cells[self.memory.place(table, position)] == expected

    def teardown(self) -> None:
        """When all have ended, everything is free, and can be had."""
        if not hasattr(self, "blocks"):
            return
        for seq_id in list(self.held):
            self.end(seq_id)
        assert self.blocks.num_free == self.num_blocks
        self.blocks.allocate(0, self.num_blocks * self.memory.block_size)
        assert not self.blocks._cache._roots

    def _admit(self, seq_id: int, token_ids: list[int], salt: str, *, looks: bool) -> None:
        limit = len(token_ids) - 1 if looks else 0
        fits = self.blocks.fits(token_ids, salt=salt, limit=limit)
        try:
            prefix = self.blocks.admit(seq_id, token_ids, salt=salt, limit=limit)
        except OutOfBlocks:
            assert not fits
            assert self.blocks.table(seq_id) == ()
            return
        assert fits
        assert prefix.num_tokens <= limit
        for copy in prefix.copies:
            for slot in range(copy.num_tokens):
                self.memory.cells[copy.target, slot] = self.memory.cells[copy.source, slot]
        self.held[seq_id] = Held(list(token_ids), salt, prefix.num_tokens)

    def _write(self, seq_id: int, token_ids: list[int]) -> None:
        """Compute the rows of all tokens that are not computed yet."""
        held, table = self.held[seq_id], self.blocks.table(seq_id)
        for position in range(held.num_computed, len(token_ids)):
            cell = Cell(held.salt, tuple(token_ids[: position + 1]))
            self.memory.cells[self.memory.place(table, position)] = cell

    def _settle(self, seq_id: int) -> None:
        """What the scheduler does after a step."""
        held = self.held[seq_id]
        if len(held.token_ids) - held.num_computed <= 1:
            self.blocks.truncate(seq_id, held.num_computed)
        settled = min(held.num_computed, len(held.token_ids))
        self.blocks.settle(seq_id, held.token_ids, settled)


def _below(branch: Branch) -> list[Node]:
    return [below for node in branch.nodes() for below in (node, *_below(node))]


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=100, stateful_step_count=30)
