"""A target and drafters that compute nothing, and watch what the engine asks of them.

The fake target's next token is a function of the whole prefix, the sampling and the position. It
keeps KV memory as a real one does (what was written where, under which prefix), so a stale cell,
a wrong table or a wrong position fails the step instead of giving some other text.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import DrafterUnavailable, TargetUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import (
    BlockCopy,
    Draft,
    SamplingSpec,
    SequenceRows,
    SequenceTokens,
    StepInput,
    StepOutput,
)

EOS_TOKEN_ID = 0


class IllegalQuery(BaseException):
    """The engine asked a drafter for what it must not. No drafter's error, so nobody forgives."""


@dataclass(frozen=True)
class FakeModel:
    """A next token for every prefix, drawn as if at random."""

    vocab_size: int = 32

    def state(self, token_ids: Iterable[int], before: int = 1) -> int:
        """What a prefix amounts to; `before` is the state of the tokens before it."""
        state = before
        for token_id in token_ids:
            state = hash((state, token_id))
        return state

    def next_token(self, state: int, position: int, sampling: SamplingSpec) -> int:
        """The token drawn for `position` after a prefix; the seed counts unless greedy."""
        seed = sampling.seed if sampling.temperature > 0 else -2
        suppressed = sampling.suppressed_token_ids if position < sampling.suppressed_before else ()
        for attempt in itertools.count():
            token_id = hash((state, position, seed, attempt)) % self.vocab_size
            if token_id not in suppressed:
                return token_id
        raise AssertionError

    def logprob(self, state: int, token_id: int) -> float:
        """Some number that only this prefix and token have."""
        return -(hash((state, token_id, 5)) % 10**6) / 10**5


@dataclass(frozen=True)
class _Cell:
    """One position's KV: the token, and the state its prefix and itself amount to."""

    token_id: int
    state: int


class FakeTarget:
    """Satisfies `interfaces.Target`, and asserts that every step is a legal one.

    `during_step` is called while the step is in flight. `steps` are all inputs so far.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        during_step: Callable[[StepInput], object] = lambda _: None,
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._during_step = during_step
        self._cells: dict[tuple[int, int], _Cell] = {}
        self.steps: list[StepInput] = []

    async def step(self, step: StepInput) -> StepOutput:
        """Write all rows, then sample and verify from what the memory reads back."""
        self.steps.append(step)
        self._check_tables(step)
        await asyncio.sleep(0)
        self._during_step(step)
        for copy in step.copies:
            self._copy(copy)
        answers = [self._compute(rows) for rows in step.sequences]
        return StepOutput(step.step_id, tuple(answer for answer in answers if answer))

    def _check_tables(self, step: StepInput) -> None:
        assert step.sequences, "a step without rows"
        seq_ids = [rows.seq_id for rows in step.sequences]
        assert len(set(seq_ids)) == len(seq_ids), "a sequence twice in one step"
        users = Counter(block for rows in step.sequences for block in rows.block_table)
        assert all(0 <= block < self._num_blocks for block in users)
        for rows in step.sequences:
            unsettled = rows.block_table[rows.start // self._block_size :]
            assert all(users[block] == 1 for block in unsettled), "others see what is written"

    def _copy(self, copy: BlockCopy) -> None:
        assert 0 < copy.num_tokens <= self._block_size
        assert copy.source != copy.target
        for slot in range(copy.num_tokens):
            cell = self._cells.get((copy.source, slot))
            assert cell is not None, f"slot {slot} of block {copy.source} was never computed"
            self._cells[copy.target, slot] = cell

    def _compute(self, rows: SequenceRows) -> SequenceTokens | None:
        assert rows.token_ids, "a sequence without rows"
        assert all(0 <= token_id < self._model.vocab_size for token_id in rows.token_ids)
        assert rows.start + len(rows.token_ids) < self._max_model_len, "no room for the next token"
        assert 0 <= rows.num_drafts < len(rows.token_ids)
        assert rows.sampling is not None or rows.num_drafts == 0
        states = self._write(rows)
        scores = tuple(map(self._model.logprob, states, rows.scored_token_ids))
        if rows.sampling is None:
            if not scores:
                return None
            return SequenceTokens(seq_id=rows.seq_id, num_accepted=0, token_ids=(), scores=scores)
        first = len(rows.token_ids) - rows.num_drafts - 1
        drawn = tuple(
            self._model.next_token(states[i], rows.start + i + 1, rows.sampling)
            for i in range(first, len(states))
        )
        drafts = rows.token_ids[first + 1 :]
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == drawn[num_accepted]:
            num_accepted += 1
        token_ids = drawn[: num_accepted + 1]
        logprobs = tuple(
            self._model.logprob(states[first + i], token_id) for i, token_id in enumerate(token_ids)
        )
        return SequenceTokens(
            seq_id=rows.seq_id,
            num_accepted=num_accepted,
            token_ids=token_ids,
            logprobs=logprobs if rows.logprobs else (),
            top_logprobs=tuple(((token_ids[i], logprobs[i]),) for i in range(len(token_ids)))
            if rows.top_logprobs
            else (),
            scores=scores,
        )

    def _write(self, rows: SequenceRows) -> list[int]:
        """Store the rows; the state after each. The prefix is read back and must be whole."""
        state = self._model.state(())
        for position in range(rows.start):
            cell = self._cells.get(self._place(rows, position))
            assert cell is not None, f"position {position} was never computed"
            state = self._model.state([cell.token_id], state)
            assert cell.state == state, f"position {position} is of another prefix"
        states = []
        for position, token_id in enumerate(rows.token_ids, start=rows.start):
            state = self._model.state([token_id], state)
            self._cells[self._place(rows, position)] = _Cell(token_id, state)
            states.append(state)
        return states

    def _place(self, rows: SequenceRows, position: int) -> tuple[int, int]:
        return rows.block_table[position // self._block_size], position % self._block_size


class FailingTarget(FakeTarget):
    """Raises `error` from its step number `fails_at` on, counted from 1."""

    def __init__(
        self,
        model: FakeModel,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        fails_at: int,
        error: BaseException | None = None,
    ) -> None:
        super().__init__(
            model, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len
        )
        self._fails_at = fails_at
        self._error = error or TargetUnavailable("the rank is gone")

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget, until it fails."""
        answer = await super().step(step)
        if len(self.steps) >= self._fails_at:
            raise self._error
        return answer


class FakeDrafter:
    """Base of the fakes: refuses illegal queries, and keeps all of them.

    `held` are the sequences it was asked about and not yet told to forget.
    """

    def __init__(self, model: FakeModel, *, context_limit: int | None = None) -> None:
        self.model = model
        self.queries: list[tuple[int, int, int]] = []  # (seq_id, context length, num_wanted)
        self.held: set[int] = set()
        self._released: set[int] = set()
        self._context_limit = context_limit

    @property
    def name(self) -> str:
        """The class's name."""
        return type(self).__name__

    @property
    def context_limit(self) -> int | None:
        """As given."""
        return self._context_limit

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Whatever `draft` says for each."""
        if not queries:
            raise IllegalQuery("called for nothing")
        for query in queries:
            self._check(query)
            self.queries.append((query.seq_id, len(query.token_ids), query.num_wanted))
            self.held.add(query.seq_id)
        return {query.seq_id: Draft(tuple(self.draft(query))) for query in queries}

    def _check(self, query: DraftQuery) -> None:
        length = len(query.token_ids) + query.num_wanted
        legal = (
            query.num_wanted > 0
            and query.seq_id not in self._released
            and all(0 <= token_id < self.model.vocab_size for token_id in query.token_ids)
            and (self._context_limit is None or length <= self._context_limit)
        )
        if not legal:
            raise IllegalQuery(query)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget them."""
        for seq_id in seq_ids:
            self._released.add(seq_id)
            self.held.discard(seq_id)

    def draft(self, query: DraftQuery) -> Sequence[int]:
        """The drafts of one sequence."""
        del query
        return ()


class SilentDrafter(FakeDrafter):
    """Has nothing to say."""


class SameDrafter(FakeDrafter):
    """Guesses with the target's own model: always right."""

    def draft(self, query: DraftQuery) -> Sequence[int]:
        """The target's own next tokens."""
        state = self.model.state(query.token_ids)
        drafts: list[int] = []
        for position in range(len(query.token_ids), len(query.token_ids) + query.num_wanted):
            drafts.append(self.model.next_token(state, position, query.sampling))
            state = self.model.state(drafts[-1:], state)
        return drafts


class SiblingDrafter(SameDrafter):
    """Right at each position with probability `agreement`, and sometimes brings fewer."""

    def __init__(
        self, model: FakeModel, *, agreement: float = 0.7, context_limit: int | None = None
    ) -> None:
        super().__init__(model, context_limit=context_limit)
        self._random = random.Random(5)
        self._agreement = agreement

    def draft(self, query: DraftQuery) -> Sequence[int]:
        """The target's tokens, some of them changed."""
        drafts = [
            token_id
            if self._random.random() < self._agreement
            else self._random.randrange(self.model.vocab_size)
            for token_id in super().draft(query)
        ]
        return drafts[: self._random.randint(0, 2 * query.num_wanted)]


class RandomDrafter(FakeDrafter):
    """Guesses blindly."""

    def __init__(self, model: FakeModel, *, context_limit: int | None = None) -> None:
        super().__init__(model, context_limit=context_limit)
        self._random = random.Random(6)

    def draft(self, query: DraftQuery) -> Sequence[int]:
        """Any tokens."""
        return [self._random.randrange(self.model.vocab_size) for _ in range(query.num_wanted)]


class LyingDrafter(FakeDrafter):
    """Answers with everything the protocol forbids, a different one each time."""

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Too many, negative, too large, not numbers, not drafts, of strangers, or not at all."""
        await super().propose(queries)
        lies: list[object] = [
            Draft((1,) * 1000),
            Draft((-1, 2)),
            Draft((1, self.model.vocab_size)),
            Draft(("one", None)),  # type: ignore[arg-type]
            Draft(None),  # type: ignore[arg-type]
            "draft",
            Draft((True, 1.0)),  # type: ignore[arg-type]
        ]
        lie = lies[len(self.queries) % len(lies)]
        answer = {query.seq_id: lie for query in queries} | {-7: Draft((1,))}
        return answer if len(self.queries) % 11 else None  # type: ignore[return-value]


class DyingDrafter(SameDrafter):
    """Proposes well `survives` times, then raises `error` for ever."""

    def __init__(
        self,
        model: FakeModel,
        *,
        survives: int = 2,
        error: BaseException | None = None,
        context_limit: int | None = None,
    ) -> None:
        super().__init__(model, context_limit=context_limit)
        self._left = survives
        self._error = error or DrafterUnavailable("died")

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """As SameDrafter, until it dies."""
        answer = await super().propose(queries)
        self._left -= 1
        if self._left < 0:
            raise self._error
        return answer


class LateDrafter(SameDrafter):
    """Right, but every other answer comes too late: it sleeps until it is cancelled."""

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """As SameDrafter, every other time."""
        answer = await super().propose(queries)
        if len(self.queries) % 2:
            await asyncio.Event().wait()
        return answer
