"""The compute side of a target: one forward pass, sampling and verification for each step."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from cluster.errors import TargetUnavailable
from cluster.messages import SamplingSpec, SequenceRows, SequenceTokens, StepInput, StepOutput
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.sampling.draw import sample, token_log_probs
from cluster.sampling.verify import verify

T = TypeVar("T")


class TargetWorker:
    """A decoder with KV memory of its own. Not for two threads at once."""

    def __init__(self, decoder: Decoder, *, num_blocks: int, block_size: int) -> None:
        self._decoder = decoder
        self._block_size = block_size
        self._cache = _cache(decoder, num_blocks=num_blocks, block_size=block_size)

    @property
    def vocab_size(self) -> int:
        """Entries of a row of logits, padding of the vocabulary included."""
        return self._decoder.spec.vocab_size

    @torch.inference_mode()
    def step(self, step: StepInput) -> StepOutput:
        """Compute all rows in one forward pass, then draw and verify where that was asked.

        Only the last `num_drafts + 1` rows of sampled sequences go through the head. A token that
        row i of a sequence draws stands at position `start + i + 1`, which decides its noise.
        Raises ValueError when a sequence has drafts but no row before them.
        """
        runs = _runs(step.sequences)
        if not step.sequences:
            return StepOutput(step.step_id, ())
        hidden = self._forward(step.sequences)
        if not runs:
            return StepOutput(step.step_id, ())
        rows = [row for run in runs for row in run.rows]
        logits = self._decoder.logits(hidden[rows])
        drawn = sample(
            logits,
            [run.sampling for run in runs for _ in run.rows],
            [position for run in runs for position in run.positions],
        )
        return StepOutput(step.step_id, tuple(_verified(runs, drawn, logits)))

    def self_check(self) -> tuple[str, ...]:
        """The schedules whose results differ in some bit from a plain prefill; empty is exact.

        Computes a few hundred rows beside the live KV memory, in a small one of the same layout.
        """
        return _SelfCheck(self._decoder, block_size=self._block_size).failures()

    def _forward(self, sequences: Sequence[SequenceRows]) -> Tensor:
        token_ids = [token_id for sequence in sequences for token_id in sequence.token_ids]
        segments = [
            Segment(sequence.block_table, sequence.start, len(sequence.token_ids))
            for sequence in sequences
        ]
        tensor = torch.tensor(token_ids, dtype=torch.int64, device=self._decoder.device)
        return self._decoder.forward(tensor, segments, self._cache)


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
        if self._closed:
            raise TargetUnavailable("the target is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)

    def close(self) -> None:
        """End the thread, after the step it is in. May be called again."""
        self._closed = True
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class _Run:
    """The sampled rows of one sequence: `rows` of the flat batch, drawing at `positions`."""

    sequence: SequenceRows
    sampling: SamplingSpec
    rows: range
    positions: range


def _runs(sequences: Sequence[SequenceRows]) -> list[_Run]:
    runs: list[_Run] = []
    end = 0
    for sequence in sequences:
        num_rows, num_sampled = len(sequence.token_ids), sequence.num_drafts + 1
        end += num_rows
        if sequence.sampling is None:
            continue
        if num_sampled > num_rows:
            message = f"sequence {sequence.seq_id}: {sequence.num_drafts} drafts in {num_rows} rows"
            raise ValueError(message)
        stop = sequence.start + num_rows + 1
        positions = range(stop - num_sampled, stop)
        runs.append(_Run(sequence, sequence.sampling, range(end - num_sampled, end), positions))
    return runs


def _verified(runs: Sequence[_Run], drawn: Sequence[int], logits: Tensor) -> list[SequenceTokens]:
    """Apply the acceptance rule to every run; `drawn` and `logits` have a row per sampled row."""
    answers: list[SequenceTokens] = []
    first = 0
    for run in runs:
        num_rows = len(run.rows)
        own = drawn[first : first + num_rows]
        drafts = run.sequence.token_ids[len(run.sequence.token_ids) - run.sequence.num_drafts :]
        num_accepted = verify(drafts, own).num_accepted
        kept = tuple(own[: num_accepted + 1])  # accepted drafts are equal to these
        log_probs: tuple[float, ...] = ()
        if run.sequence.logprobs:
            log_probs = tuple(token_log_probs(logits[first : first + len(kept)], kept))
        answers.append(
            SequenceTokens(
                seq_id=run.sequence.seq_id,
                num_accepted=num_accepted,
                token_ids=kept,
                logprobs=log_probs,
            )
        )
        first += num_rows
    return answers


def _cache(decoder: Decoder, *, num_blocks: int, block_size: int) -> KVCache:
    return KVCache(
        decoder.spec,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=decoder.dtype,
        device=decoder.device,
    )


class _SelfCheck:
    """Computes the end of one sequence by several schedules and compares bits.

    Three sequences have room; number 0 is the one that is looked at. `length` goes past 64
    keys, where attention takes a second chunk of them.
    """

    def __init__(self, decoder: Decoder, *, block_size: int) -> None:
        self._decoder = decoder
        self._length = min(72, decoder.spec.max_position_embeddings)
        self._tail = self._length - min(8, self._length // 2)
        block_size = min(block_size, 128)
        self._num_blocks = -(-self._length // block_size)
        self._cache = _cache(decoder, num_blocks=3 * self._num_blocks, block_size=block_size)

    @torch.inference_mode()
    def failures(self) -> tuple[str, ...]:
        """The names of what differs from one plain prefill."""
        expected = self._logits((0, 0, self._length))[self._tail :]
        schedules: dict[str, Callable[[], Tensor]] = {
            "single rows": self._single_rows,
            "prompt chunks": self._prompt_chunks,
            "rows beside other sequences": self._beside_others,
            "rows after a truncate": self._after_truncate,
        }
        failures = [
            name for name, logits in schedules.items() if not torch.equal(logits(), expected)
        ]
        if not _samples_row_by_row(expected):
            failures.append("sampling")
        return tuple(failures)

    def _single_rows(self) -> Tensor:
        rows = range(self._tail, self._length)
        return torch.cat([self._logits((0, row, row + 1)) for row in rows])

    def _prompt_chunks(self) -> Tensor:
        third = self._tail // 3
        bounds = {0, third, third + 1, max(self._tail - 5, 0), self._tail + 3, self._length}
        chunks = [self._logits((1, *chunk)) for chunk in pairwise(sorted(bounds))]
        return torch.cat(chunks)[self._tail :]

    def _beside_others(self) -> Tensor:
        others = ((1, self._tail, self._tail + 3), (2, 0, 1))
        return self._logits(others[0], (0, self._tail, self._length), others[1])[3:-1]

    def _after_truncate(self) -> Tensor:
        self._logits((0, self._tail, self._length), shift=1)
        middle = self._tail + 2
        return torch.cat(
            [
                self._logits((2, 0, 5), (0, self._tail, middle))[5:],
                self._logits((0, middle, self._length), (2, 5, 6))[:-1],
            ]
        )

    def _logits(self, *parts: tuple[int, int, int], shift: int = 0) -> Tensor:
        """Logits of the rows (sequence, start, stop), all sequences being of the same tokens.

        Another `shift` makes them other tokens.
        """
        segments, token_ids = [], []
        for sequence, start, stop in parts:
            first_block = sequence * self._num_blocks
            block_table = tuple(range(first_block, first_block + self._num_blocks))
            segments.append(Segment(block_table, start, stop - start))
            token_ids += [self._token_id(position + shift) for position in range(start, stop)]
        tensor = torch.tensor(token_ids, dtype=torch.int64, device=self._decoder.device)
        return self._decoder.logits(self._decoder.forward(tensor, segments, self._cache))

    def _token_id(self, position: int) -> int:
        return (7919 * position + 13) % self._decoder.spec.vocab_size


def _samples_row_by_row(logits: Tensor) -> bool:
    """Whether tokens and logprobs of rows together are those of each row alone."""
    kinds = (
        SamplingSpec(seed=1, temperature=0.0),
        SamplingSpec(seed=2, temperature=0.8, top_p=0.95),
        SamplingSpec(seed=3, temperature=1.5),
        SamplingSpec(seed=4, temperature=1.0, top_k=50, min_p=0.01),
    )
    specs = [kinds[row % len(kinds)] for row in range(len(logits))]
    positions = list(range(len(logits)))
    together = sample(logits, specs, positions)
    log_probs = token_log_probs(logits, together)
    for row, (spec, token_id) in enumerate(zip(specs, together, strict=True)):
        alone = logits[row : row + 1].clone()
        if sample(alone, [spec], [row]) != [token_id]:
            return False
        if token_log_probs(alone, [token_id]) != [log_probs[row]]:
            return False
    return True
