"""Seconds of one target step and of its matrix work, by sequences and rows.

The matrix work is the linear layers of all layers and the head by themselves: as many, of the
same shapes and kind as the target's, on as many rows, in the same thread, measured in turn with
the steps. What a step takes beyond it is attention, norms, sampling and the way to each operation.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from cluster.config import DType, TargetConfig
from cluster.local import build_target_worker, use_threads
from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.models.linear import Linear, linear_for
from cluster.models.load import load_spec
from cluster.models.spec import ModelSpec
from cluster.tools.bench.progress import Report
from cluster.worker import TargetWorker

SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 1), (16, 1))  # sequences x rows each
CONTEXT = 256
REPEATS = 15
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians over the repeats; a step is whole, with sampling and verification."""

    dtype: DType
    num_sequences: int
    num_rows: int
    seconds: float
    matrix_seconds: float

    @property
    def share_beyond_matrices(self) -> float:
        """The part of the step that is not matrix work."""
        return 1 - self.matrix_seconds / self.seconds

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "dtype": self.dtype,
            "sequences": self.num_sequences,
            "rows": self.num_rows,
            "seconds": self.seconds,
            "matrix_seconds": self.matrix_seconds,
            "share_beyond_matrices": self.share_beyond_matrices,
        }


@dataclass(frozen=True, slots=True)
class StepReport:
    """Every shape in every number format."""

    steps: tuple[StepTime, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [step.as_json() for step in self.steps]

    def __rich__(self) -> Table:
        table = Table(title="Milliseconds of one target step", title_justify="left")
        headings = ("weights", "sequences", "rows each", "step", "matrices", "beyond", "to one row")
        for heading in headings:
            table.add_column(heading, justify="right")
        single = {step.dtype: step.seconds for step in reversed(self.steps)}
        for step in self.steps:
            table.add_row(
                step.dtype,
                str(step.num_sequences),
                str(step.num_rows),
                f"{step.seconds * 1000:.1f}",
                f"{step.matrix_seconds * 1000:.1f}",
                f"{step.share_beyond_matrices:.0%}",
                f"{step.seconds / single[step.dtype]:.2f}x",
            )
        return table


def measure_steps(
    model: str,
    folder: Path,
    dtypes: Sequence[DType],
    *,
    report: Report,
    repeats: int = REPEATS,
) -> StepReport:
    """Step times of every shape after a context of CONTEXT tokens, greedy."""
    use_threads(None)
    steps: list[StepTime] = []
    for dtype in dtypes:
        config = TargetConfig(model=model, dtype=dtype, max_model_len=2 * CONTEXT)
        worker = build_target_worker(config, folder)
        matrices = _Matrices(load_spec(folder), dtype=dtype, device=config.device)
        steps += _measure(worker, matrices, dtype, repeats, report)
    return StepReport(tuple(steps))


def _measure(
    worker: TargetWorker, matrices: "_Matrices", dtype: DType, repeats: int, report: Report
) -> list[StepTime]:
    """All shapes in turn, step and matrices after one another, time and again."""
    _prefill(worker)
    times: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    total = repeats + WARM_UPS
    for repeat in range(total):
        report(f"steps, {dtype}", repeat, total)
        for shape in SHAPES:
            step = _timed_step(worker, *shape)
            times[shape].append((step, matrices.timed(shape[0] * shape[1])))
    report(f"steps, {dtype}", total, total)
    return [
        StepTime(dtype, *shape, *map(statistics.median, zip(*taken[WARM_UPS:], strict=True)))
        for shape, taken in times.items()
    ]


class _Matrices:
    """The linear layers of a model of that shape, with random weights, and nothing between."""

    @torch.inference_mode()
    def __init__(self, spec: ModelSpec, *, dtype: DType, device: str) -> None:
        make = linear_for(device, dtype)
        kind = torch.float32 if dtype == "int8" else getattr(torch, dtype)
        generator = torch.Generator(device).manual_seed(0)
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        layer = (
            (num_heads * spec.head_dim, spec.hidden_size, spec.qkv_bias),
            (spec.hidden_size, spec.num_heads * spec.head_dim, spec.output_bias),
            (2 * spec.intermediate_size, spec.hidden_size, False),
            (spec.hidden_size, spec.intermediate_size, False),
        )

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).mul_(0.02).to(kind)

        self._random = random
        self._linears: list[tuple[Linear, int]] = [
            (make(random(num_out, num_in), random(num_out) if bias else None), num_in)
            for num_out, num_in, bias in (
                *(layer * spec.num_layers),
                (spec.vocab_size, spec.hidden_size, False),
            )
        ]

    @torch.inference_mode()
    def timed(self, num_rows: int) -> float:
        """Seconds of all products; a row that is alone is computed twice, as the target does."""
        rows = {num_in: self._random(max(num_rows, 2), num_in) for _, num_in in self._linears}
        start = time.perf_counter()
        for linear, num_in in self._linears:
            linear(rows[num_in])
        return time.perf_counter() - start


def _prefill(worker: TargetWorker) -> None:
    for seq_id in range(max(num_sequences for num_sequences, _ in SHAPES)):
        rows = SequenceRows(
            seq_id=seq_id,
            block_table=(seq_id,),
            start=0,
            token_ids=tuple((seq_id * 7 + position) % 200 + 50 for position in range(CONTEXT)),
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
