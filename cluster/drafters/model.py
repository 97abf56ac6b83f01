"""A small model that drafts: the same class inside a draft worker and inside the engine's process.

Drafts are drawn with the target's own sampling, seed and positions, so that both use the same
noise and mostly draw the same token.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from cluster.drafters.contexts import DraftContext, DraftContexts
from cluster.drafters.exchange import ExchangeClient
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import (
    Draft,
    DraftWanted,
    ExchangeInput,
    ExchangeOutput,
    Resync,
    SamplingSpec,
)
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.sampling.draw import sample

MAX_ROWS = 128


@dataclass(slots=True)
class _Chain:
    """A draft being made: `token_ids` so far, of `num_wanted`, after the context's own."""

    seq_id: int
    context: DraftContext
    num_wanted: int
    sampling: SamplingSpec
    token_ids: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the next drafted token will stand."""
        return len(self.context.token_ids) + len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Context tokens the KV memory does not hold yet."""
        return len(self.context.token_ids) - len(self.context.computed_token_ids)

    def next_rows(self, at_most: int) -> list[int]:
        """The first uncomputed tokens of the context."""
        start = len(self.context.computed_token_ids)
        return self.context.token_ids[start : start + at_most]


class DraftModel:
    """Follows the sequences of any number of engines and drafts for them. Used by one thread.

    Each of `num_blocks` sequences has one block of `block_size` tokens, its whole context. The
    keys and values of what a message has in common with the one before stay. Every exchange does
    one forward pass over the tokens that are new, of at most `max_rows` rows, and one for each
    further draft token, over all sequences together. A longer context is taken in over several
    exchanges, and drafted for when it is complete.

    `vocab_size`, the target's, keeps the drafts to tokens that it has.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int | None = None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self._decoder = decoder
        self._cache = KVCache(
            decoder.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._contexts = DraftContexts(num_blocks)
        self._context_limit = min(block_size, decoder.spec.max_position_embeddings)
        self._num_drawable = min(vocab_size or decoder.spec.vocab_size, decoder.spec.vocab_size)
        self._max_rows = max_rows

    @property
    def context_limit(self) -> int:
        """Tokens of context and draft together that fit."""
        return self._context_limit

    @property
    def num_sequences(self) -> int:
        """Sequences whose context is held."""
        return len(self._contexts)

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Follow the sequences to where they are now and draft what is wanted of each.

        A draft is shorter than wanted, or empty, where the context limit is near, where a token
        is none of the draft's own, and while a long context is still being taken in.
        """
        contexts = self._contexts.receive(message)
        drafts: dict[int, Draft | Resync] = {}
        chains: list[_Chain] = []
        for wanted in message.wanted:
            context = contexts[wanted.seq_id]
            drafts[wanted.seq_id] = Resync() if context is None else Draft()
            if context is not None:
                chains += self._chains_of(wanted, context)
        if chains:
            with torch.inference_mode():
                self._draft(chains)
        drafts |= {chain.seq_id: Draft(tuple(chain.token_ids)) for chain in chains}
        return ExchangeOutput(message.step_id, drafts)

    def _chains_of(self, wanted: DraftWanted, context: DraftContext) -> list[_Chain]:
        """One chain, or none where nothing can be drafted."""
        num_wanted = min(wanted.num_wanted, self._context_limit - len(context.token_ids))
        if num_wanted < 1 or not context.token_ids:
            return []
        num_settled = context.settle()
        if max(context.token_ids[num_settled:]) >= self._decoder.spec.vocab_size:
            return []
        sampling = self._within_vocabulary(wanted.sampling)
        return [_Chain(wanted.seq_id, context, num_wanted, sampling)]

    def _within_vocabulary(self, sampling: SamplingSpec) -> SamplingSpec:
        """The same without suppressed ids that have no logit here."""
        if max(sampling.suppressed_token_ids, default=0) < self._num_drawable:
            return sampling
        known = (each for each in sampling.suppressed_token_ids if each < self._num_drawable)
        return replace(sampling, suppressed_token_ids=tuple(known))

    def _draft(self, chains: Sequence[_Chain]) -> None:
        """Lengthen every chain as far as wanted, all of them by one token a forward pass."""
        growing, hidden = self._take_in(chains)
        while growing:
            logits = self._decoder.logits(hidden)[:, : self._num_drawable]
            specs = [chain.sampling for chain in growing]
            drawn = sample(logits, specs, [chain.position for chain in growing])
            for chain, token_id in zip(growing, drawn, strict=True):
                chain.token_ids.append(token_id)
            growing = [chain for chain in growing if len(chain.token_ids) < chain.num_wanted]
            if growing:
                hidden = self._forward([(chain, chain.token_ids[-1:]) for chain in growing])

    def _take_in(self, chains: Sequence[_Chain]) -> tuple[list[_Chain], Tensor]:
        """Compute new context tokens, of the shortest arrears first.

        Returns the chains whose context is complete and the hidden state of each one's last token.
        """
        parts: list[tuple[_Chain, list[int]]] = []
        room = self._max_rows
        for chain in sorted(chains, key=lambda chain: chain.num_uncomputed):
            if room:
                parts.append((chain, chain.next_rows(room)))
                room -= len(parts[-1][1])
        hidden = self._forward(parts)
        complete = [index for index, (chain, _) in enumerate(parts) if chain.num_uncomputed == 0]
        return [parts[index][0] for index in complete], hidden[complete]

    def _forward(self, parts: Sequence[tuple[_Chain, list[int]]]) -> Tensor:
        """Compute some tokens after what each context's slot holds: `[len(parts), hidden]`.

        The result is the hidden state of each part's last token.
        """
        segments: list[Segment] = []
        flat: list[int] = []
        last_rows: list[int] = []
        for chain, token_ids in parts:
            start = len(chain.context.computed_token_ids)
            segments.append(Segment((chain.context.slot,), start, len(token_ids)))
            flat += token_ids
            last_rows.append(len(flat) - 1)
        rows = torch.tensor(flat, dtype=torch.int64, device=self._decoder.device)
        hidden = self._decoder.forward(rows, segments, self._cache)
        for chain, token_ids in parts:
            chain.context.computed_token_ids += token_ids
        return hidden[last_rows]


class Exchanges(Protocol):
    """What a ModelDrafter asks: a DraftModel."""

    @property
    def context_limit(self) -> int:
        """Tokens of context and draft together that fit."""
        ...

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Drafts for a message; blocks for as long as they take."""
        ...


class ModelDrafter:
    """A draft model in the engine's process, in a thread of its own.

    A call that is cancelled at its deadline leaves the thread at work; until it is done further
    calls find it busy, and its answer still brings the protocol's state up to date.
    """

    def __init__(self, draft_model: Exchanges, *, name: str) -> None:
        self._draft_model = draft_model
        self._name = name
        self._client = ExchangeClient("in-process")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
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
        self._thread.shutdown()

    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    async def _exchange(self, message: ExchangeInput) -> dict[int, Draft]:
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._thread, self._draft_model.exchange, message)
        drafts = self._client.digest(answer)
        self._tell_of_ends()
        return drafts

    def _tell_of_ends(self) -> None:
        """Have the model drop ended sequences; the next message repeats it, so no one waits."""
        if self._client.num_unconfirmed and not self._closed:
            self._thread.submit(self._draft_model.exchange, self._client.message(()))
