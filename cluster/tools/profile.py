"""`drafthouse profile`: what a step costs on this machine, and what drafts could bring at that."""

from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from rich.console import Group
from rich.table import Table

from cluster.config import TargetConfig
from cluster.config.environment import profiles_folder
from cluster.control.cost import CostTable
from cluster.control.policy import StepShape
from cluster.local import build_target_worker, use_threads
from cluster.models.reference import resolve
from cluster.profiling.steps import CONTEXTS, measure_points
from cluster.profiling.store import (
    ProfileKey,
    is_disturbed,
    profile_key,
    save_points,
)
from cluster.tools.bench.progress import Report

BUDGET_SECONDS = 15.0  # nobody waits to be served
ACCEPTANCES = (0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Drafts that cost nothing, right with one probability each: K and what it brings."""

    num_sequences: int
    acceptance: float
    rates: tuple[float, ...]  # tokens per second by K, from 0 on

    @property
    def best(self) -> int:
        """The K that brings most."""
        return max(range(len(self.rates)), key=self.rates.__getitem__)

    @property
    def gain(self) -> float:
        """What it brings, to no drafts."""
        return self.rates[self.best] / self.rates[0]


@dataclass(frozen=True)
class ProfileReport:
    """A profile, and what follows from it."""

    model: str
    key: ProfileKey
    table: CostTable

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of sequences that were measured."""
        return tuple(sorted({shape.num_sequences for shape in self.table.points}))

    @cached_property
    def ridge(self) -> float | None:
        """The rows from which a step is compute-bound; None if that is beyond what was measured.

        Up to there a step takes what streaming the weights takes, and beyond a time for each
        row: where both are equal is the ridge.
        """
        most = max(shape.num_rows for shape in self.table.points)
        shape = StepShape(num_sequences=1, num_rows=1, num_context_tokens=CONTEXTS[0])
        flat, half, whole = (
            self.table.seconds(shape, num_rows - 1) for num_rows in (1, max(most // 2, 1), most)
        )
        per_row = (whole - half) / max(most - most // 2, 1)
        return flat / per_row if per_row > 0 and flat < per_row * most else None

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """For every batch size and some acceptances."""
        numbers = np.arange(self.key.max_num_speculative_tokens + 1)
        return tuple(
            Expected(
                num_sequences=batch,
                acceptance=acceptance,
                rates=tuple(
                    float(rate)
                    for rate in batch
                    * (1 - acceptance ** (numbers + 1))
                    / (1 - acceptance)
                    / self.table.seconds(_plain(batch), batch * numbers)
                ),
            )
            for batch in self.batches
            for acceptance in ACCEPTANCES
        )

    def as_json(self) -> dict[str, object]:
        """Plain data, in seconds and tokens per second."""
        return {
            "model": self.model,
            "measured_on": asdict(self.key),
            "points": [asdict(shape) | {"seconds": s} for shape, s in self.table.points.items()],
            "ridge_rows": self.ridge,
            "expected": [
                asdict(each) | {"best_num_speculative_tokens": each.best, "gain": each.gain}
                for each in self.expected
            ],
        }

    def __rich__(self) -> Group:
        return Group(self._steps(), self._gains(), self._ridge_line(), *self._doubts())

    def _steps(self) -> Table:
        title = f"One step of {self.model}, {self.key.dtype}, {self.key.num_threads} threads"
        table = Table(title=title, title_justify="left")
        for heading in ("sequences", "rows each", "context each", "ms", "to one row", "table says"):
            table.add_column(heading, justify="right")
        ordered = sorted(self.table.points.items(), key=lambda item: _order(item[0]))
        single = ordered[0][1]
        for shape, seconds in ordered:
            table.add_row(
                str(shape.num_sequences),
                str(shape.num_rows // shape.num_sequences),
                str(shape.num_context_tokens // shape.num_sequences - 1),
                f"{seconds * 1000:.1f}",
                f"{seconds / single:.2f}x",
                f"{self.table.seconds(shape) * 1000:.1f}",
            )
        return table

    def _gains(self) -> Table:
        table = Table(title="What drafts that cost nothing would bring", title_justify="left")
        for heading in ("sequences", "acceptance", "plain tokens/s", "best K", "tokens/s", "gain"):
            table.add_column(heading, justify="right")
        for each in self.expected:
            table.add_row(
                str(each.num_sequences),
                f"{each.acceptance:g}",
                f"{each.rates[0]:.1f}",
                str(each.best),
                f"{each.rates[each.best]:.1f}",
                f"{each.gain:.2f}x",
            )
        return table

    def _ridge_line(self) -> str:
        if self.ridge is None:
            return "Memory-bound, as far as was measured: no ridge."
        return f"Memory-bound up to about {self.ridge:.0f} rows, compute-bound beyond."

    def _doubts(self) -> list[str]:
        if not is_disturbed(self.table.points):
            return []
        return ["The machine was busy with something else meanwhile: measure again. Not stored."]


def profile(
    config: TargetConfig,
    *,
    max_num_speculative_tokens: int,
    report: Report,
) -> ProfileReport:
    """Time a target's steps and store them if nothing disturbed it. Raises ConfigurationError."""
    report("steps", 0, 1)
    use_threads(config.num_threads)
    folder = resolve(config.model)
    worker = build_target_worker(config, folder)
    sizes = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_speculative_tokens": max_num_speculative_tokens,
        "max_model_len": config.max_model_len,
    }
    key = profile_key(worker, folder=folder, dtype=config.dtype, **sizes)
    points = measure_points(worker, **sizes, budget_seconds=BUDGET_SECONDS)
    if not is_disturbed(points):
        save_points(profiles_folder(), key, points)
    report("steps", 1, 1)
    return ProfileReport(config.model, key, CostTable(points))


def _plain(num_sequences: int) -> StepShape:
    """A step without drafts, after short contexts."""
    return StepShape(
        num_sequences=num_sequences,
        num_rows=num_sequences,
        num_context_tokens=num_sequences * CONTEXTS[0],
    )


def _order(shape: StepShape) -> tuple[int, int, int]:
    return shape.num_sequences, shape.num_rows, shape.num_context_tokens
