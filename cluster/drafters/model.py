"""A small model that drafts: the same class inside a draft worker and inside the engine's process.

Drafts are drawn with the target's own sampling, seed and positions. Under the coupled rule both use
the same noise and mostly draw the same token; under the ratio rule a draft has noise of its own,
and brings the distribution it was drawn from.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from cluster.drafters.ahead import DraftThread, Exchanges, ExchangeThread
from cluster.drafters.contexts import DraftContext, DraftContexts, TailToken
from cluster.drafters.exchange import ExchangeClient
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Resync, Rule, VersionGrade
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.sampling.propose import propose

MAX_ROWS = 128
MAX_TAIL = 32


class DraftModel:
    """Follows the sequences of any number of engines and drafts for them. Used by one thread.

    Each of `num_blocks` sequences has one block of `block_size` tokens, its whole context. After
    what is committed it holds a tail of drafted tokens. A message that confirms the beginning of a
    tail leaves the rest of it standing, with its keys and values; any other cuts it off.

    `exchange` makes what is wanted and missing; `advance`, called whenever nothing else is to do,
    makes the tails longer than that. Both do so by one token of all sequences in one forward pass
    of at most `max_rows` rows. Longer contexts are taken in by parts, and drafted for when they are
    complete: by `advance`, so that nobody's draft waits for them, or where it is never called by
    one part in each exchange.

    A tail grows to twice the tokens last wanted and one, for all of a draft may be kept and the
    token after it guessed; to `max_tail` at most; and until it survives with less than the price.
    `vocab_size`, the target's, keeps the drafts to tokens that it has. `name` is put on them.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int | None = None,
        max_rows: int = MAX_ROWS,
        max_tail: int = MAX_TAIL,
        name: str = "",
    ) -> None:
        self._decoder = decoder
        self._cache = KVCache.of(decoder, num_blocks=num_blocks, block_size=block_size)
        self._contexts = DraftContexts(num_blocks)
        self._context_limit = min(block_size, decoder.spec.max_position_embeddings)
        self._num_drawable = min(vocab_size or decoder.spec.vocab_size, decoder.spec.vocab_size)
        self._max_rows = max_rows
        self._num_rows_ahead = max(max_rows // 4, 1)  # what an exchange may have to wait for
        self._max_tail = max_tail
        self._name = name
        self._advances = False  # has been called since the last exchange
        self._pass_seconds = 0.0

    @property
    def context_limit(self) -> int:
        """Tokens of context and draft together that fit."""
        return self._context_limit

    @property
    def num_sequences(self) -> int:
        """Sequences whose context is held."""
        return len(self._contexts)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._contexts.tally.version

    @property
    def grades(self) -> tuple[VersionGrade, ...]:
        """What the target thought of the drafts of each version of the weights."""
        return self._contexts.tally.grades

    def drop_stale(self) -> None:
        """Forget sequences that their engines have forgotten, as DraftContexts does."""
        self._contexts.drop_stale()

    def swap(self, decoder: Decoder, *, version: int) -> None:
        """Draft with other weights of the same shapes from now on.

        Contexts stay, and are computed anew: by `advance`, or where that is never called in the
        next exchanges.
        """
        self._decoder = decoder
        self._contexts.start_over(version)

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Follow the sequences to where they are now and give what is wanted of each one's tail.

        A draft is shorter than wanted, or empty, where the context limit is near, where a token
        is none of the draft's own, where the sampling leaves no token of the draft's to draw,
        while a long context is still being taken in, where it survives with less than the price,
        and when the message's budget is used up.
        """
        begin = time.perf_counter()
        contexts = self._contexts.receive(message)
        self._complete(
            [context for context in contexts.values() if context is not None],
            end=begin + message.budget_seconds,
        )
        self._advances = False
        drafts = {seq_id: self._answer(context) for seq_id, context in contexts.items()}
        return ExchangeOutput(message.step_id, drafts)

    def advance(self) -> bool:
        """Lengthen all tails by one token, or take in parts of contexts, in one forward pass.

        Returns whether there was anything to do; if not, nothing will be before the next exchange.
        """
        self._advances = True
        growing = [each for each in self._contexts if self._may_grow(each, self._ahead(each))]
        if growing:
            self._grow(growing, max_rows=self._num_rows_ahead)
        return bool(growing)

    def _complete(self, contexts: Sequence[DraftContext], *, end: float) -> None:
        """Lengthen tails to what is wanted while there is time."""
        few = self._num_rows_ahead if self._advances else inf
        while growing := [
            each
            for each in contexts
            if each.num_uncomputed <= few and self._may_grow(each, each.num_wanted)
        ]:
            if self._advances and time.perf_counter() + self._pass_seconds > end:
                return
            begin = time.perf_counter()
            self._grow(growing, max_rows=self._max_rows)
            seconds = time.perf_counter() - begin
            self._pass_seconds += 0.2 * (seconds - self._pass_seconds)
            few = self._num_rows_ahead

    def _ahead(self, context: DraftContext) -> int:
        """How long a tail may get that nobody asks for."""
        return max(context.num_wanted, min(2 * context.num_wanted + 1, self._max_tail))

    def _may_grow(self, context: DraftContext, length: int) -> bool:
        """Whether a tail can and should have another token, on its way to a length."""
        room = self._context_limit - len(context.token_ids)
        if context.ended or not context.token_ids:
            return False
        if len(context.tail) >= min(length, room):
            return False
        if max(context.next_rows(self._max_rows)) >= self._decoder.spec.vocab_size:
            return False
        margins = context.margins
        return self._contexts.survival.num_worth(margins, context.price) == len(margins)

    def _answer(self, context: DraftContext | None) -> Draft | Resync:
        if context is None:
            return Resync()
        margins = context.margins[: context.num_wanted]
        num_tokens = self._contexts.survival.num_worth(margins, context.price)
        return context.draft(num_tokens, drafter=self._name, version=self.version)

    @torch.inference_mode()
    def _grow(self, contexts: Sequence[DraftContext], *, max_rows: int) -> None:
        """One forward pass over uncomputed tokens, of the shortest arrears first.

        Each tail whose tokens are then all computed gets its next one.
        """
        parts: list[tuple[DraftContext, list[int]]] = []
        complete: list[int] = []
        for context in sorted(contexts, key=lambda each: (each.num_uncomputed, len(each.tail))):
            if max_rows:
                token_ids = context.next_rows(max_rows)
                if len(token_ids) == context.num_uncomputed:
                    complete.append(len(parts))
                parts.append((context, token_ids))
                max_rows -= len(token_ids)
        hidden = self._forward(parts)
        if complete:
            logits = self._decoder.logits(hidden[complete])[:, : self._num_drawable]
            lengthen([parts[index][0] for index in complete], logits)

    def _forward(self, parts: Sequence[tuple[DraftContext, list[int]]]) -> Tensor:
        """Compute some tokens after what each context's slot holds: `[len(parts), hidden]`.

        The result is the hidden state of each part's last token.
        """
        segments: list[Segment] = []
        flat: list[int] = []
        last_rows: list[int] = []
        for context, token_ids in parts:
            segments.append(Segment((context.slot,), context.num_computed, len(token_ids)))
            flat += token_ids
            last_rows.append(len(flat) - 1)
        rows = torch.tensor(flat, dtype=torch.int64, device=self._decoder.device)
        hidden = self._decoder.forward(rows, segments, self._cache)
        for context, token_ids in parts:
            context.computed(len(token_ids))
        return hidden[last_rows]


def lengthen(contexts: Sequence[DraftContext], logits: Tensor) -> None:
    """Add to each tail the token that its row of logits (`[len(contexts), vocab]`) brings."""
    for rule in Rule:
        rows = [row for row, context in enumerate(contexts) if context.rule is rule]
        if not rows:
            continue
        own = [contexts[row] for row in rows]
        drawn = propose(
            logits if len(rows) == len(contexts) else logits[rows],
            [context.sampling for context in own],
            [context.num_tokens for context in own],
            histories=[context.history for context in own],
            rule=rule,
        )
        for context, draft in zip(own, drawn, strict=True):
            if draft is None:
                context.ended = True
            else:
                context.append(TailToken(draft.token_id, draft.margin, draft.distribution))


class ModelDrafter:
    """A draft model in the engine's process, in a thread of its own unless another is given.

    A call that is cancelled at its deadline leaves the thread at work; until it is done further
    calls find it busy, and its answer still brings the protocol's state up to date. `rule` is how
    the engine verifies drafts. With `run_ahead` the thread drafts while the target verifies: worth
    it where that takes nothing from the target.
    """

    def __init__(
        self,
        draft_model: Exchanges,
        *,
        name: str,
        rule: Rule = Rule.COUPLED,
        run_ahead: bool = False,
        thread: ExchangeThread | None = None,
    ) -> None:
        self._draft_model = draft_model
        self._name = name
        self._client = ExchangeClient("in-process", rule=rule)
        self._thread = thread or DraftThread(draft_model, run_ahead=run_ahead)
        self._running: asyncio.Task[dict[int, Draft]] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The draft model's name."""
        return self._name

    @property
    def context_limit(self) -> int | None:
        """The draft model's context."""
        return self._draft_model.context_limit

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Drafts by sequence id.

        Raises DrafterUnavailable when an earlier call is still computing, or after `close`. What
        the model itself raises passes through.
        """
        if self._closed:
            raise DrafterUnavailable("none")
        if self._is_busy():
            raise DrafterUnavailable("busy")
        self._running = asyncio.create_task(self._exchange(self._client.message(queries)))
        return await asyncio.shield(self._running)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended, at once if the model is idle."""
        self._client.release(seq_ids)
        if not self._is_busy():
            self._tell_of_ends()

    def close(self) -> None:
        """End the thread, after what it is computing now."""
        self._closed = True
        self._thread.close()

    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    async def _exchange(self, message: ExchangeInput) -> dict[int, Draft]:
        answer = await asyncio.wrap_future(self._thread.exchange(message))
        drafts = self._client.digest(answer)
        self._tell_of_ends()
        return drafts

    def _tell_of_ends(self) -> None:
        """Have the model drop ended sequences; the next message repeats it, so no one waits."""
        if self._client.num_unconfirmed and not self._closed:
            self._thread.exchange(self._client.message(()))
