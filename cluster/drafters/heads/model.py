"""What drafts with a head beside the target: who is drafted for, how far, and by which rows.

target's thread    step ──settled rows──> HiddenRows
                   exchange ──> contexts ──> rows of their settled positions ──> Head ──> tails

A tail is drawn anew in each exchange: the head guessed the hidden states it was drafted from, and
by the next exchange the target has computed the true ones.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cluster.drafters.ahead import Exchanges
from cluster.drafters.contexts import DraftContext, DraftContexts
from cluster.drafters.model import lengthen
from cluster.drafters.thread import Thread
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Resync
from cluster.models.hidden import HiddenRows, HiddenWanted


@dataclass(frozen=True, slots=True)
class Known:
    """One sequence as a head is told of it.

    There are hidden states of positions `start` on, up to the one before the last of `token_ids`:
    `rows(start, stop)` has some of them, `[stop - start, width]`. Those before `start` the head was
    told of before, unless `is_new`. `slot` is the sequence's place in the head's own memory.
    """

    slot: int
    token_ids: Sequence[int]
    start: int
    rows: Callable[[int, int], Tensor]
    is_new: bool

    @property
    def stop(self) -> int:
        """The position of the last token, whose state is not known yet."""
        return len(self.token_ids) - 1


class Head(Protocol):
    """Turns the target's hidden states into logits for the tokens after the last one.

    Its state is a tensor with a row for each sequence that it is drafting for.
    """

    @property
    def wanted(self) -> HiddenWanted:
        """The hidden states it reads."""
        ...

    @property
    def context_limit(self) -> int:
        """Tokens of context and draft together that fit."""
        ...

    @property
    def max_draft(self) -> int:
        """Tokens it can draft in a row."""
        ...

    def begin(self, sequences: Sequence[Known]) -> Tensor:
        """Read what is new of the sequences: their state, `[sequences, ...]`."""
        ...

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Logits `[rows, vocab]` of the target's vocabulary for token `depth` of the drafts."""
        ...

    def follow(
        self, state: Tensor, slots: Sequence[int], positions: Sequence[int], drawn: Sequence[int]
    ) -> Tensor:
        """The state after the tokens `drawn`, which stand at `positions`."""
        ...


@dataclass(slots=True)
class _Read:
    """Up to which position the head has read a context."""

    context: DraftContext
    stop: int = 0


class HeadModel:
    """Follows the sequences of one engine and drafts for them. Used by the target's thread alone.

    `name` is put on the drafts.
    """

    def __init__(self, head: Head, rows: HiddenRows, *, name: str = "") -> None:
        self._head = head
        self._rows = rows
        self._contexts = DraftContexts(head.wanted.num_sequences)
        self._read: dict[int, _Read] = {}
        self._name = name

    @property
    def context_limit(self) -> int:
        """Tokens of context and draft together that fit."""
        return self._head.context_limit

    @torch.inference_mode()
    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Follow the sequences to where they are now, and draft what is wanted.

        A draft is shorter than wanted, or empty, where the target has not kept the hidden states,
        where the head drafts no further, where the context limit is near, where the sampling leaves
        no token to draw, and where it survives with less than the price.
        """
        for seq_id in message.finished:
            self._read.pop(seq_id, None)
            self._rows.forget(seq_id)
        contexts = self._contexts.receive(message)
        self._draft({seq_id: each for seq_id, each in contexts.items() if each is not None})
        answers = {seq_id: self._answer(context) for seq_id, context in contexts.items()}
        return ExchangeOutput(message.step_id, answers)

    def advance(self) -> bool:
        """Nothing: what is drafted ahead would rest on hidden states that are guessed."""
        return False

    def _draft(self, contexts: dict[int, DraftContext]) -> None:
        for context in contexts.values():
            context.drop_tail()
        known = {
            seq_id: its
            for seq_id, context in contexts.items()
            if self._may_grow(context) and (its := self._known(seq_id, context)) is not None
        }
        if not known:
            return
        growing = [contexts[seq_id] for seq_id in known]
        state = self._head.begin(list(known.values()))
        for depth in range(self._head.max_draft):
            lengthen(growing, self._head.logits(state, depth))
            going_on = [row for row, context in enumerate(growing) if self._may_grow(context)]
            if not going_on:
                return
            if len(going_on) < len(growing):
                growing = [growing[row] for row in going_on]
                state = state[going_on]
            state = self._head.follow(
                state,
                [context.slot for context in growing],
                [context.num_tokens - 1 for context in growing],
                [context.tail[-1].token_id for context in growing],
            )

    def _known(self, seq_id: int, context: DraftContext) -> Known | None:
        """What the head has to read of a sequence, or None when there is nothing to draft from."""
        token_ids = context.token_ids
        stop = len(token_ids) - 1  # the last token's own row comes with the next step
        first = self._rows.first(seq_id, token_ids)
        if first is None:
            return None
        read = self._read.get(seq_id)
        if read is None or read.context is not context:
            read = self._read[seq_id] = _Read(context)
        start = min(read.stop, stop - 1)
        is_new = read.stop == 0 or read.stop > stop or start < first
        if is_new:
            start = first
        read.stop = stop
        rows = partial(self._rows.rows, seq_id)
        return Known(context.slot, token_ids, start, rows, is_new=is_new)

    def _may_grow(self, context: DraftContext) -> bool:
        """Whether a tail can and should have another token."""
        room = self.context_limit - len(context.token_ids)
        wanted = min(context.num_wanted, room, self._head.max_draft)
        if context.ended or len(context.tail) >= wanted:
            return False
        margins = context.margins
        return self._contexts.survival.num_worth(margins, context.price) == len(margins)

    def _answer(self, context: DraftContext | None) -> Draft | Resync:
        if context is None:
            return Resync()
        num_tokens = self._contexts.survival.num_worth(context.margins, context.price)
        return context.draft(num_tokens, drafter=self._name)


class BesideTarget:
    """The target's own thread: a model's exchanges come between two steps."""

    def __init__(self, model: Exchanges, thread: Thread) -> None:
        self._model = model
        self._thread = thread

    def exchange(self, message: ExchangeInput) -> Future[ExchangeOutput]:
        """What the model answers, or the error it raised. Raises what the thread does if closed."""
        return self._thread.submit(lambda: self._model.exchange(message))

    def close(self) -> None:
        """The thread is the target's, and ends with it."""
