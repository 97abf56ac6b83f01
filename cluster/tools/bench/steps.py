"""Seconds of one target step, by sequences and rows, for each number format of the weights."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config import DType, TargetConfig
from cluster.local import build_target_worker
from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.worker import TargetWorker

SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 1), (16, 1))  # sequences x rows each
CONTEXT = 256
REPEATS = 15


@dataclass(frozen=True, slots=True)
class StepTime:
    """The median over interleaved repeats, sampling and verification included."""

    dtype: DType
    num_sequences: int
    num_rows: int
    seconds: float


def measure_steps(
    model: str, folder: Path, dtypes: Sequence[DType], *, progress: Callable[[str], None]
) -> list[StepTime]:
    """Step times of every shape after a context of CONTEXT tokens, greedy."""
    measured = []
    for dtype in dtypes:
        progress(f"step times, {dtype}")
        config = TargetConfig(model=model, dtype=dtype, max_model_len=2 * CONTEXT)
        worker = build_target_worker(config, folder)
        _prefill(worker)
        times: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
        for _ in range(REPEATS + 2):
            for shape in SHAPES:
                times[shape].append(_timed_step(worker, *shape))
        measured += [
            StepTime(dtype, *shape, statistics.median(taken[2:])) for shape, taken in times.items()
        ]
    return measured


def _prefill(worker: TargetWorker) -> None:
    for seq_id in range(max(num_sequences for num_sequences, _ in SHAPES)):
        rows = SequenceRows(
            seq_id=seq_id,
            block_table=(seq_id,),
            start=0,
            token_ids=tuple((seq_id * 7 + position) % 1000 + 100 for position in range(CONTEXT)),
        )
        worker.step(StepInput(0, (rows,)))


def _timed_step(worker: TargetWorker, num_sequences: int, num_rows: int) -> float:
    sequences = tuple(
        SequenceRows(
            seq_id=seq_id,
            block_table=(seq_id,),
            start=CONTEXT,
            token_ids=tuple(range(200, 200 + num_rows)),
            num_drafts=num_rows - 1,
            sampling=SamplingSpec(seed=0, temperature=0.0),
        )
        for seq_id in range(num_sequences)
    )
    start = time.perf_counter()
    worker.step(StepInput(1, sequences))
    return time.perf_counter() - start
