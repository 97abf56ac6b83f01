"""`drafthouse bench parallel`: what it costs to direct the ranks of a tensor-parallel target.

The control cost of a step is what passes between giving it to the ranks and having the answer,
less the time that rank 0 computes in it, exchanges with the other ranks included.
"""

import statistics
import time
from dataclasses import dataclass

from rich.table import Table

from cluster.actors.alone import lone_ray
from cluster.actors.target import RankGroup, start_ranks
from cluster.config import DrafthouseConfig, TargetConfig
from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.tools.bench.progress import Report

SHAPES = ((1, 1), (1, 5), (4, 1), (8, 1), (8, 5), (1, 256))  # sequences, rows of each
CONTEXT = 64
MAX_MODEL_LEN = 512
MAX_DRAFTED = 16  # rows of a sequence up to which they are drafts, and more a chunk of a prompt
WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectedStep:
    """Seconds of steps of one shape: as the engine sees them, and beyond what rank 0 computes."""

    num_sequences: int
    rows_each: int
    step: float  # medians
    computed: float
    control: float
    control_p95: float


@dataclass(frozen=True, slots=True)
class ParallelReport:
    """Every shape on so many ranks."""

    model: str
    num_ranks: int
    steps: tuple[DirectedStep, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data, in milliseconds."""
        return {
            "model": self.model,
            "num_ranks": self.num_ranks,
            "steps": [
                {
                    "num_sequences": step.num_sequences,
                    "rows_each": step.rows_each,
                    "step_ms": round(step.step * 1000, 3),
                    "computed_ms": round(step.computed * 1000, 3),
                    "control_ms": round(step.control * 1000, 3),
                    "control_p95_ms": round(step.control_p95 * 1000, 3),
                }
                for step in self.steps
            ],
        }

    def __rich__(self) -> Table:
        title = f"Milliseconds of a step on {self.num_ranks} ranks, {self.model}"
        table = Table(title=title, title_justify="left")
        for heading in ("sequences", "rows each", "step", "computed", "control", "control, p95"):
            table.add_column(heading, justify="right")
        for step in self.steps:
            times = (step.step, step.computed, step.control, step.control_p95)
            table.add_row(
                str(step.num_sequences),
                str(step.rows_each),
                *(f"{seconds * 1000:.2f}" for seconds in times),
            )
        return table


async def bench_parallel(
    model: str, *, num_ranks: int, repeats: int, report: Report
) -> ParallelReport:
    """Start the ranks on a Ray of their own and time their steps. Raises ConfigurationError."""
    target = TargetConfig(
        model=model,
        tensor_parallel_size=num_ranks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(num_sequences for num_sequences, _ in SHAPES),
        resources={"CPU": 0.0},
    )
    report("starting ranks", 0, 1)
    with lone_ray():
        group = await start_ranks(DrafthouseConfig(target=target), name="bench")
        report("starting ranks", 1, 1)
        times: dict[tuple[int, int], list[tuple[float, float]]] = {shape: [] for shape in SHAPES}
        total = repeats + WARM_UPS
        for repeat in range(total):
            report("steps", repeat, total)
            for shape, taken in times.items():
                taken.append(await _timed(group, *shape))
        report("steps", total, total)
        group.close()
    steps = tuple(_summed_up(*shape, taken[WARM_UPS:]) for shape, taken in times.items())
    return ParallelReport(model, num_ranks, steps)


async def _timed(group: RankGroup, num_sequences: int, rows_each: int) -> tuple[float, float]:
    """Seconds of a greedy step, and of those the ones that rank 0 computed."""
    sequences = tuple(
        SequenceRows(
            seq_id=seq_id,
            block_table=(seq_id,),
            start=CONTEXT,
            token_ids=tuple(range(100, 100 + rows_each)),
            num_drafts=rows_each - 1 if rows_each <= MAX_DRAFTED else 0,
            sampling=SamplingSpec(seed=0, temperature=0.0),
        )
        for seq_id in range(num_sequences)
    )
    begin = time.perf_counter()
    await group.step(StepInput(1, sequences))
    seconds = time.perf_counter() - begin
    return seconds, await group.computed_seconds()


def _summed_up(
    num_sequences: int, rows_each: int, taken: list[tuple[float, float]]
) -> DirectedStep:
    control = sorted(step - computed for step, computed in taken)
    return DirectedStep(
        num_sequences=num_sequences,
        rows_each=rows_each,
        step=statistics.median(step for step, _ in taken),
        computed=statistics.median(computed for _, computed in taken),
        control=statistics.median(control),
        control_p95=control[int(0.95 * (len(control) - 1))],
    )
