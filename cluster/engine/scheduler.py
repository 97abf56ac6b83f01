"""Who has rows in the next step, and how many.

A step's budget is spent in this order: one row for every running sequence, then the rest of the
prompts under way and newly admitted ones, oldest first, then drafts. Prompts leave drafts up to
half of what is left after the first rows, and drafts leave prompts the other half. A sequence is
admitted only into a row that is left, so running ones never outnumber the budget: none of them
ever skips a step, whatever the budget.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.control.policy import Policy
from cluster.engine.blocks import BlockManager
from cluster.engine.limits import EngineLimits
from cluster.engine.plan import Plan, Turn
from cluster.engine.sequence import Sequence
from cluster.errors import OutOfBlocks


@dataclass(frozen=True, slots=True)
class DraftSize:
    """How many drafts a sequence may bring, and which limit cut it, if one did."""

    num_drafts: int
    limited_by: str | None = None


def size_draft(num_wanted: int, room: Mapping[str, int]) -> DraftSize:
    """The one place where a draft is clamped: the least of what is wanted and every room.

    `room` is by limit, tokens; of equal limits the first is named.
    """
    limit = min(room, key=room.__getitem__)
    if num_wanted <= room[limit]:
        return DraftSize(num_wanted)
    return DraftSize(max(room[limit], 0), limit)


class Scheduler:
    """Keeps the queues and the blocks, and makes a plan of them once a step.

    Planning settles where sequences live (admitted, preempted, their blocks) and changes no
    token. A sequence that must make room is computed again later: its tokens come out equal,
    because they depend on nothing but the target, the seed and the position.
    """

    def __init__(self, limits: EngineLimits, *, draft_context_limit: int | None) -> None:
        self._limits = limits
        self._draft_context_limit = draft_context_limit
        self._step_id = 0
        self.blocks = BlockManager(limits.num_blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    @property
    def step_id(self) -> int:
        """The step planned last; 0 before the first."""
        return self._step_id

    @property
    def has_work(self) -> bool:
        """Whether a plan would have a turn for anyone."""
        return bool(self.running or self.waiting)

    @property
    def num_queued(self) -> int:
        """Waiting sequences beyond those that the next steps can admit at once."""
        open_places = self._limits.max_num_seqs - len(self.running)
        return max(len(self.waiting) - open_places, 0)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and take back its blocks. No step may be using them."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.blocks.free(sequence.seq_id)

    def schedule(self, policy: Policy) -> Plan:
        """Plan one step. There is at least one turn while there is work."""
        self._step_id += 1
        rows = self._first_rows()
        left = self._limits.max_num_batched_tokens - len(rows)
        wanted = self._wanted_drafts(policy, rows)
        left -= self._fill_prompts(rows, left - min(sum(wanted.values()), left // 2))
        sizes = self._size_drafts(wanted, left)
        turns = tuple(
            Turn(
                sequence=sequence,
                num_rows=num_rows,
                num_drafts=sizes[sequence].num_drafts if sequence in sizes else 0,
                block_table=self.blocks.table(sequence.seq_id),
            )
            for sequence, num_rows in rows.items()
        )
        limits = tuple(size.limited_by for size in sizes.values() if size.limited_by)
        return Plan(self._step_id, turns, limits)

    def _first_rows(self) -> dict[Sequence, int]:
        """One row for each running sequence, after making room for its tokens."""
        for sequence in tuple(self.running):
            self._hold_blocks(sequence)
        return dict.fromkeys(self.running, 1)

    def _hold_blocks(self, sequence: Sequence) -> None:
        """Have blocks for all its tokens, at the cost of the youngest, which may be itself."""
        while sequence in self.running:
            try:
                self.blocks.allocate(sequence.seq_id, len(sequence.token_ids))
            except OutOfBlocks:
                self._preempt(self.running[-1])
            else:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, to be computed again from its first token."""
        self.running.remove(sequence)
        self.blocks.free(sequence.seq_id)
        sequence.num_computed_tokens = 0
        self.waiting.appendleft(sequence)

    def _wanted_drafts(self, policy: Policy, rows: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """What policy and request ask for, for sequences with one uncomputed token."""
        decoding = [
            sequence
            for sequence in rows
            if sequence.num_uncomputed_tokens == 1 and sequence.request.speculation.enabled
        ]
        chosen = policy.choose([sequence.seq_id for sequence in decoding], num_rows=len(rows))
        wanted = {}
        for sequence in decoding:
            cap = sequence.request.speculation.max_tokens
            num_chosen = chosen.get(sequence.seq_id, 0)
            num_wanted = num_chosen if cap is None else min(num_chosen, cap)
            if num_wanted > 0:
                wanted[sequence] = num_wanted
        return wanted

    def _fill_prompts(self, rows: dict[Sequence, int], budget: int) -> int:
        """Lengthen the prompts under way, then admit waiting ones; how many rows it took."""
        left = budget
        for sequence, num_rows in rows.items():
            num_more = min(sequence.num_uncomputed_tokens - num_rows, left)
            rows[sequence] = num_rows + num_more
            left -= num_more
        while left > 0 and self._admit_next():
            sequence = self.running[-1]
            rows[sequence] = min(sequence.num_uncomputed_tokens, left)
            left -= rows[sequence]
        return budget - left

    def _admit_next(self) -> bool:
        """Move the head of the queue to the running ones if its place and blocks can be had."""
        if not self.waiting or len(self.running) >= self._limits.max_num_seqs:
            return False
        sequence = self.waiting[0]
        try:
            self.blocks.allocate(sequence.seq_id, len(sequence.token_ids))
        except OutOfBlocks:
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _size_drafts(
        self, wanted: Mapping[Sequence, int], budget: int
    ) -> dict[Sequence, DraftSize]:
        """Clamp every draft and reserve its blocks; together at most `budget` rows."""
        sizes = {}
        for sequence, num_wanted in wanted.items():
            size = size_draft(num_wanted, self._room(sequence, budget))
            self.blocks.allocate(sequence.seq_id, len(sequence.token_ids) + size.num_drafts)
            budget -= size.num_drafts
            sizes[sequence] = size
        return sizes

    def _room(self, sequence: Sequence, budget: int) -> dict[str, int]:
        """Drafts that fit under each limit, by the names of metrics.DRAFT_LIMITS."""
        num_tokens = len(sequence.token_ids)
        room = {
            "target_context": sequence.context_left - 1,
            "max_tokens": sequence.max_tokens_left - 1,
            "budget": min(budget, self.blocks.max_length(sequence.seq_id) - num_tokens),
        }
        if self._draft_context_limit is not None:
            room["draft_context"] = self._draft_context_limit - num_tokens
        return room
