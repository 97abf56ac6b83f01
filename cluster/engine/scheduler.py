"""Who has rows in the next step, and how many.

A step's budget of `max_num_batched_tokens` rows is spent in this order:

1. One row for each sequence that decodes. None of them ever skips a step, whatever the budget:
   no more sequences run than it has rows.
2. Prompts: those under way and newly admitted ones, in the order of rank, each as far as it goes.
   They leave drafts up to half of what is left, and drafts leave them the other half. Beside
   sequences that decode, all prompts together have rows that cost no more than the first
   `prompt_rows` of a prompt (a row costs more the more keys it sees), so that a long prompt makes
   a step longer by a bounded time, and running streams go on. When nothing
   decodes the whole budget is theirs. What a preempted sequence computes again counts as a prompt,
   too.
3. Drafts.

Within one priority the tenants that wait are let in by their weights; see `shares`.

Rank is level, then age (the order of arrival). A sequence's level is its request's priority, and
one more for every AGING_STEPS steps that it has waited: of two sequences whose priorities are n
apart, the lower is passed by newcomers for at most about n * AGING_STEPS steps of waiting.

A place or memory is taken from a running sequence only for

- a running one of higher rank that needs a block for its next token; the lowest in rank makes
  room, which may be the one that asks;
- the first in line, when it has no place or no memory, from those that are lower both in priority
  and in level, and only if that lets it in.

Who makes room keeps its tokens, goes back before all later arrivals of its priority, and is
computed again, as far as its blocks were needed meanwhile. The highest in rank is never put back,
so somebody always gets to the end.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from cluster.control.policy import Candidate, Policy
from cluster.engine.blocks import BlockManager
from cluster.engine.limits import USUAL_PROMPT_ROWS, EngineLimits
from cluster.engine.plan import Plan, Turn, shape_of
from cluster.engine.queue import WaitingQueue, level, rank
from cluster.engine.sequence import Sequence
from cluster.engine.shares import Shares
from cluster.errors import OutOfBlocks
from cluster.messages import BlockCopy


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


@dataclass(slots=True)
class _Moves:
    """What planning a step did to sequences: let in for the first time, or put back."""

    admitted: list[Sequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_preempted: int = 0


class Scheduler:
    """Keeps the queue, the running sequences and the blocks, and makes a plan once a step.

    Planning settles where sequences live (admitted, preempted, their blocks) and changes no
    token. A sequence that must make room is computed again later: its tokens come out equal,
    because they depend on nothing but the target, the seed and the position.
    """

    def __init__(self, limits: EngineLimits, *, draft_context_limit: int | None) -> None:
        self._limits = limits
        self._draft_context_limit = draft_context_limit
        self._step_id = 0
        self._moves = _Moves()
        self.blocks = BlockManager(limits.num_blocks, limits.block_size, reuse=limits.prefix_cache)
        self.shares = Shares()
        self.waiting = WaitingQueue(self.shares)
        self.running: list[Sequence] = []  # in the order of their admission

    @property
    def step_id(self) -> int:
        """The step planned last; 0 before the first."""
        return self._step_id

    @property
    def has_work(self) -> bool:
        """Whether a plan would have a turn for anyone."""
        return bool(self.running or len(self.waiting))

    @property
    def num_queued(self) -> int:
        """Waiting sequences beyond those that the next steps can admit at once."""
        open_places = self._limits.max_num_seqs - len(self.running)
        return max(len(self.waiting) - open_places, 0)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence in the queue."""
        self.waiting.push(sequence, self._step_id)
        self.shares.enter(sequence.request.tenant)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and take back its blocks. No step may be using them."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence, self._step_id)
        self.blocks.free(sequence.seq_id)
        self.shares.leave(sequence.request.tenant)

    def schedule(
        self,
        policy: Policy,
        *,
        urgency: Callable[[Sequence], float] = lambda _: 1.0,
        prompt_rows: Callable[[int], int] = lambda _: USUAL_PROMPT_ROWS,
    ) -> Plan:
        """Plan one step. There is at least one turn while there is work.

        `urgency` is what a token of a sequence is worth, next to one that has time; `prompt_rows`
        says how many rows of prompts may stand beside so many sequences that decode.
        """
        self._step_id += 1
        self._moves = _Moves()
        for sequence in tuple(self.running):
            self._hold_blocks(sequence)
        self._make_way()
        rows = dict.fromkeys((s for s in self.running if s.num_uncomputed_tokens == 1), 1)
        left = self._limits.max_num_batched_tokens - len(rows)
        wanted = self._wanted_drafts(policy, tuple(rows), urgency)
        cost = self._limits.prompt_cost(prompt_rows(len(rows)), 0) if rows else math.inf
        left -= self._fill_prompts(rows, left - min(sum(wanted.values()), left // 2), cost)
        for sequence, num_rows in rows.items():
            self.shares.charge(sequence.request.tenant, num_rows)
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
        return Plan(
            self._step_id,
            turns,
            price=policy.price,
            draft_limits=tuple(size.limited_by for size in sizes.values() if size.limited_by),
            copies=tuple(self._moves.copies),
            admitted=tuple(self._moves.admitted),
            num_preempted=self._moves.num_preempted,
        )

    def settle(self, sequence: Sequence) -> None:
        """Give back blocks of rejected drafts; let others use what is committed and computed."""
        num_computed = sequence.num_computed_tokens
        if sequence.num_uncomputed_tokens <= 1:  # a prompt under way keeps its blocks
            self.blocks.truncate(sequence.seq_id, num_computed)
        self.blocks.settle(
            sequence.seq_id, sequence.token_ids, min(num_computed, len(sequence.token_ids))
        )

    def _hold_blocks(self, sequence: Sequence) -> None:
        """Have blocks for all its tokens, at the cost of the last in rank: it may be itself."""
        while sequence in self.running:
            try:
                self.blocks.allocate(sequence.seq_id, len(sequence.token_ids))
            except OutOfBlocks:
                self._preempt(max(self.running, key=self._rank))
            else:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, to be computed again from the first token that is not kept."""
        self.running.remove(sequence)
        self.blocks.free(sequence.seq_id)
        sequence.num_computed_tokens = 0
        self.waiting.push(sequence, self._step_id)
        self._moves.num_preempted += 1

    def _make_way(self) -> None:
        """Let in whoever is first in line and more important than some that run."""
        while (first := self.waiting.first(self._step_id)) is not None:
            victims = self._victims(first)
            if not victims:
                return
            for victim in victims:
                self._preempt(victim)
            admitted = self._admit(first)
            assert admitted, "room was made, and there is none"

    def _victims(self, first: Sequence) -> list[Sequence]:
        """The fewest that make room for it, lowest rank first; empty if it needs or gets none."""
        victims: list[Sequence] = []
        lower = [
            sequence
            for sequence in self.running
            if sequence.request.priority < first.request.priority
            and level(sequence, self._step_id) < level(first, self._step_id)
        ]
        lower.sort(key=self._rank)
        while not self._has_room(first, without=victims):
            if not lower:
                return []
            victims.append(lower.pop())
        return victims

    def _wanted_drafts(
        self,
        policy: Policy,
        decoding: Collection[Sequence],
        urgency: Callable[[Sequence], float],
    ) -> dict[Sequence, int]:
        """What policy and request ask for."""
        willing = [sequence for sequence in decoding if sequence.request.speculation.enabled]
        chosen = policy.choose(
            [_candidate(sequence, urgency(sequence)) for sequence in willing],
            shape_of([(sequence, 1) for sequence in decoding]),
        )
        wanted = {}
        for sequence in willing:
            cap = sequence.request.speculation.max_tokens
            num_chosen = chosen.get(sequence.seq_id, 0)
            num_wanted = num_chosen if cap is None else min(num_chosen, cap)
            if num_wanted > 0:
                wanted[sequence] = num_wanted
        return wanted

    def _fill_prompts(self, rows: dict[Sequence, int], budget: int, cost: float) -> int:
        """Give prompts their rows, and admit whoever is next for some; how many rows it took.

        Together they cost at most `cost`, or are a single row.
        """
        left = budget
        under_way = sorted((s for s in self.running if s not in rows), key=self._rank, reverse=True)
        first = self.waiting.first(self._step_id)
        while left > 0:
            if first is not None and not (
                under_way and self._rank(under_way[-1]) < self._rank(first)
            ):
                sequence = first
                if not self._admit(sequence):
                    first = None  # nobody overtakes it
                    continue
                first = self.waiting.first(self._step_id)
            elif under_way:
                sequence = under_way.pop()
            else:
                break
            num_rows = min(sequence.num_uncomputed_tokens, left)
            position = sequence.num_computed_tokens
            if cost < math.inf:
                affordable = self._limits.prompt_rows(cost, position)
                num_rows = min(num_rows, max(affordable, int(left == budget)))
                cost -= self._limits.prompt_cost(num_rows, position)
            if not num_rows:
                break
            rows[sequence] = num_rows
            left -= num_rows
        return budget - left

    def _has_room(self, sequence: Sequence, *, without: Collection[Sequence] = ()) -> bool:
        """Whether it could be admitted if some of the running sequences were put back."""
        most = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        return len(self.running) - len(without) < most and self.blocks.fits(
            sequence.token_ids,
            salt=sequence.request.cache_salt,
            limit=sequence.max_cached_tokens,
            without=[other.seq_id for other in without],
        )

    def _admit(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to the running ones if its place and blocks can be had."""
        if not self._has_room(sequence):
            return False
        prefix = self.blocks.admit(
            sequence.seq_id,
            sequence.token_ids,
            salt=sequence.request.cache_salt,
            limit=sequence.max_cached_tokens,
        )
        self.shares.serve(sequence.request.tenant)
        self.waiting.remove(sequence, self._step_id)
        self.running.append(sequence)
        self._moves.copies.extend(prefix.copies)
        sequence.num_computed_tokens = prefix.num_tokens
        if sequence.num_cached_tokens is None:
            num_prompt_tokens = len(sequence.request.prompt_token_ids)
            sequence.num_cached_tokens = min(prefix.num_tokens, num_prompt_tokens)
            self._moves.admitted.append(sequence)
        return True

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return rank(sequence, self._step_id)

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


def _candidate(sequence: Sequence, urgency: float) -> Candidate:
    request = sequence.request
    return Candidate(
        seq_id=sequence.seq_id,
        num_tokens=len(sequence.token_ids),
        max_drafts=request.speculation.max_tokens,
        priority=request.priority,
        urgency=urgency,
    )
