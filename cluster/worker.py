"""The compute side of a target: one forward pass, sampling and verification for each step."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cluster.errors import GrammarFailed, TargetUnavailable
from cluster.messages import Rule, SequenceRows, SequenceTokens, StepInput, StepOutput
from cluster.models.decoder import Decoder, Segment
from cluster.models.hidden import HiddenRows, HiddenWanted, SettledRows, Taps
from cluster.models.kv_cache import KVCache
from cluster.models.screen import MAX_ROWS
from cluster.processor import Processor
from cluster.sampling.answers import answers_of, greedy_answers
from cluster.sampling.logprobs import token_log_probs
from cluster.sampling.runs import Run, runs_of
from cluster.self_check import SelfCheck

T = TypeVar("T")
SCORED_AT_ONCE = 64  # bounds the memory of logits over a long prompt


class Grammars(Protocol):
    """Knows what the grammars of sequences allow."""

    def masks(self, sequence: SequenceRows) -> Tensor | None:
        """What may be drawn at the sampled rows, bool `[num_drafts + 1, vocab]`; None for all.

        Raises GrammarFailed when this sequence cannot go on.
        """
        ...


class TargetWorker:
    """A decoder with KV memory of its own. Not for two threads at once."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._decoder = decoder
        self._grammars = grammars
        self._cache = KVCache.of(decoder, num_blocks=num_blocks, block_size=block_size)
        self._kept: list[HiddenRows] = []

    @property
    def decoder(self) -> Decoder:
        """What computes the rows."""
        return self._decoder

    @property
    def vocab_size(self) -> int:
        """Entries of a row of logits, padding of the vocabulary included."""
        return self._decoder.spec.vocab_size

    @property
    def cache(self) -> KVCache:
        """The KV memory; whoever else writes into it does so while nothing runs."""
        return self._cache

    @property
    def processor(self) -> Processor:
        """What computes here."""
        return Processor.of_this_process(self._decoder.device)

    def keep_hidden(self, wanted: HiddenWanted) -> HiddenRows:
        """Keep hidden states of settled rows from the next step on, for whoever drafts with them.

        They are for the thread that the steps are taken in.
        """
        decoder = self._decoder
        kept = HiddenRows(
            wanted,
            hidden_size=decoder.spec.hidden_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._kept.append(kept)
        return kept

    @torch.inference_mode()
    def step(self, step: StepInput) -> StepOutput:
        """Compute all rows in one forward pass, then draw, verify and score where that was asked.

        Only sampled and scored rows go through the head. A token that row i of a sequence draws
        stands at position `start + i + 1`, which decides its noise. A sequence whose grammar
        failed, or that no token is left for, gets an error, the others what they always get.
        Raises ValueError when a sequence has drafts but no row before them, or scores without rows.
        """
        runs = runs_of(step.sequences)
        if not step.sequences:
            return StepOutput(step.step_id, ())
        taps = self._taps()
        hidden = self._computed(step, taps)
        answers = self._sampled(runs, hidden, step.rule)
        if self._kept:
            settled = _settled(step.sequences, answers)
            for kept in self._kept:
                kept.keep(settled, hidden, taps)
        for seq_id, scores in self._scores(step.sequences, hidden).items():
            answer = answers.get(
                seq_id, SequenceTokens(seq_id=seq_id, num_accepted=0, token_ids=())
            )
            answers[seq_id] = replace(answer, scores=scores)
        order = (sequence.seq_id for sequence in step.sequences)
        return StepOutput(step.step_id, tuple(answers[each] for each in order if each in answers))

    @torch.inference_mode()
    def follow(self, step: StepInput) -> None:
        """A rank's part in the step that rank 0 takes: the same passes, nothing drawn.

        Raises what `step` raises of the same input.
        """
        runs = runs_of(step.sequences)
        if step.sequences:
            hidden = self._computed(step)
            self._logits(runs, hidden)
            for _ in self._scored(step.sequences, hidden):
                pass

    def self_check(self) -> tuple[str, ...]:
        """The schedules whose results differ in some bit from a plain prefill; empty is exact.

        Computes beside the live KV memory, in a small one of the same layout.
        """
        return SelfCheck(self._decoder, block_size=self._cache.block_size).failures()

    def _taps(self) -> Taps | None:
        """The layers' inputs that somebody keeps, or None."""
        layers = [layer for kept in self._kept for layer in kept.wanted.layers]
        return Taps(layers) if layers else None

    def _computed(self, step: StepInput, taps: Taps | None = None) -> Tensor:
        """All rows after the last layer, `[num_tokens, hidden]`; the copies come first."""
        for copy in step.copies:
            self._cache.copy(copy)
        sequences = step.sequences
        token_ids = [token_id for sequence in sequences for token_id in sequence.token_ids]
        segments = [
            Segment(sequence.block_table, sequence.start, len(sequence.token_ids))
            for sequence in sequences
        ]
        tensor = torch.tensor(token_ids, dtype=torch.int64, device=self._decoder.device)
        if taps is None:
            return self._decoder.forward(tensor, segments, self._cache)
        return self._decoder.forward(tensor, segments, self._cache, taps)

    def _sampled(
        self, runs: Sequence[Run], hidden: Tensor, rule: Rule
    ) -> dict[int, SequenceTokens]:
        """The answer of every run, by sequence id."""
        largest = self._largest(runs, hidden)
        if largest is not None:
            return {answer.seq_id: answer for answer in greedy_answers(runs, largest)}
        logits = self._logits(runs, hidden)
        if logits is None:
            return {}
        constrained, answers = self._constrained(runs)
        if answers:  # all ranks computed the rows of those that failed, too
            failed = [run.sequence.seq_id in answers for run in runs for _ in run.rows]
            logits = logits[~torch.tensor(failed, device=logits.device)]
        if constrained:
            drawn = answers_of(constrained, logits, rule)
            answers |= {answer.seq_id: answer for answer in drawn}
        return answers

    def _logits(self, runs: Sequence[Run], hidden: Tensor) -> Tensor | None:
        """A row for every sampled row, in order; None when nothing is sampled."""
        rows = [row for run in runs for row in run.rows]
        return self._decoder.logits(hidden[rows]) if rows else None

    def _largest(self, runs: Sequence[Run], hidden: Tensor) -> list[int] | None:
        """The token of every sampled row, where its largest logit is all that is wanted."""
        rows = [row for run in runs for row in run.rows]
        if not 0 < len(rows) <= MAX_ROWS or not all(run.wants_largest for run in runs):
            return None
        return self._decoder.largest(hidden[rows])

    def _constrained(self, runs: Sequence[Run]) -> tuple[list[Run], dict[int, SequenceTokens]]:
        """The runs with their grammars' masks, and the answers of those whose grammar failed."""
        constrained: list[Run] = []
        failed: dict[int, SequenceTokens] = {}
        for run in runs:
            if run.sequence.grammar is None:
                constrained.append(run)
                continue
            try:
                constrained.append(replace(run, mask=self._mask(run.sequence)))
            except GrammarFailed as error:
                failed[run.sequence.seq_id] = _failed(run, error)
        return constrained, failed

    def _mask(self, sequence: SequenceRows) -> Tensor | None:
        if self._grammars is None:
            raise GrammarFailed("this target has no grammars")
        mask = self._grammars.masks(sequence)
        return None if mask is None else mask.to(self._decoder.device)

    def _scores(
        self, sequences: Sequence[SequenceRows], hidden: Tensor
    ) -> dict[int, tuple[float, ...]]:
        """The asked scores by sequence id."""
        scores: dict[int, tuple[float, ...]] = defaultdict(tuple)
        for seq_id, token_ids, logits in self._scored(sequences, hidden):
            scores[seq_id] += tuple(token_log_probs(logits, token_ids))
        return scores

    def _scored(
        self, sequences: Sequence[SequenceRows], hidden: Tensor
    ) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
        """Sequence id, tokens asked about and the logits of their rows, a few rows at a time."""
        first = 0
        for sequence in sequences:
            token_ids, num_rows = sequence.scored_token_ids, len(sequence.token_ids)
            if len(token_ids) > num_rows:
                message = f"sequence {sequence.seq_id}: {len(token_ids)} scores of {num_rows} rows"
                raise ValueError(message)
            for begin in range(0, len(token_ids), SCORED_AT_ONCE):
                some = token_ids[begin : begin + SCORED_AT_ONCE]
                rows = hidden[first + begin : first + begin + len(some)]
                yield sequence.seq_id, some, self._decoder.logits(rows)
            first += num_rows


class ThreadTarget:
    """A worker behind the `Target` protocol: its steps run one at a time in a thread of their own.

    What a step raises is raised to whoever awaits it. A caller that is cancelled leaves its step
    running to the end; the next one follows it.
    """

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="target")
        self._closed = False

    async def step(self, step: StepInput) -> StepOutput:
        """Compute, draw and verify off the event loop. Raises TargetUnavailable once closed."""
        return await self.call(lambda: self._worker.step(step))

    async def call(self, compute: Callable[[], T]) -> T:
        """Run something else between two steps, in the one thread that has torch's threads awake.

        Raises TargetUnavailable once closed.
        """
        return await asyncio.wrap_future(self.submit(compute))

    def submit(self, compute: Callable[[], T]) -> Future[T]:
        """The same, for those who do not wait. Raises TargetUnavailable once closed."""
        if self._closed:
            raise TargetUnavailable("the target is closed")
        return self._thread.submit(compute)

    def close(self) -> None:
        """End the thread, after the step it is in. May be called again."""
        self._closed = True
        self._thread.shutdown()


def _failed(run: Run, error: GrammarFailed) -> SequenceTokens:
    return SequenceTokens(
        seq_id=run.sequence.seq_id, num_accepted=0, token_ids=(), error=str(error)
    )


def _settled(
    sequences: Sequence[SequenceRows], answers: Mapping[int, SequenceTokens]
) -> list[SettledRows]:
    """What of each sequence's rows stands: all but rejected drafts; nothing of one that failed."""
    settled: list[SettledRows] = []
    first = 0
    for sequence in sequences:
        answer = answers.get(sequence.seq_id)
        num_settled = len(sequence.token_ids)
        if answer is not None:
            num_settled -= sequence.num_drafts - answer.num_accepted
        if answer is None or answer.error is None:
            token_ids = sequence.token_ids[:num_settled]
            settled.append(SettledRows(sequence.seq_id, sequence.start, token_ids, first))
        first += len(sequence.token_ids)
    return settled
