"""`drafthouse bench control`: the proof that the controller is never slower, part by part."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import ConsoleRenderable, Group, RichCast

from cluster.config import BUILTIN_MODEL
from cluster.tools.bench.decision import bench_decision
from cluster.tools.bench.open_load import LOADS, bench_open_load
from cluster.tools.bench.orchestration import OrchestrationPlan, bench_orchestration
from cluster.tools.bench.page import Section, page
from cluster.tools.bench.progress import Report
from cluster.tools.bench.real import RealPlan, bench_real
from cluster.tools.bench.simulated import bench_simulated
from cluster.tools.simulation.run import NUM_STEPS

TITLE = "Drafthouse: the controller, measured"


class Part(StrEnum):
    """What can be run by itself."""

    TIMED = "a"
    SIMULATED = "b"
    REAL = "c"
    DECISION = "decision"
    LOAD = "load"


class PartReport(RichCast, Protocol):
    """What a part found."""

    def as_json(self) -> object:
        """Plain data."""
        ...

    def section(self) -> Section:
        """For a page."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlan:
    """Which parts, and how much of each.

    `batch_sizes` keeps only these of part b's worlds, each of which is played with all `seeds`;
    `load_seconds` is for each load.
    """

    parts: Sequence[Part] = tuple(Part)
    timed: OrchestrationPlan = field(default_factory=OrchestrationPlan)
    real: RealPlan = field(default_factory=lambda: RealPlan(target=BUILTIN_MODEL))
    simulated_steps: int = NUM_STEPS
    batch_sizes: Sequence[int] | None = None
    seeds: Sequence[int] = (0,)
    loads: Sequence[float] = LOADS
    load_seconds: float = 8.0


@dataclass(frozen=True, slots=True)
class ControlReport:
    """What was found, by part."""

    parts: dict[Part, PartReport]

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {part.name.lower(): found.as_json() for part, found in self.parts.items()}

    def __rich__(self) -> ConsoleRenderable:
        return Group(*self.parts.values())

    def write_page(self, path: Path) -> None:
        """One HTML file with all tables and pictures."""
        sections = [found.section() for found in self.parts.values()]
        path.write_text(page(TITLE, sections), encoding="utf-8")


async def bench_control(plan: ControlPlan, *, report: Report) -> ControlReport:
    """Run the parts, one after another. Raises ConfigurationError."""
    run: dict[Part, Callable[[], Awaitable[PartReport]]] = {
        Part.TIMED: partial(bench_orchestration, plan.timed, report=report),
        Part.SIMULATED: partial(_simulated, plan, report),
        Part.REAL: partial(bench_real, plan.real, report=report),
        Part.DECISION: partial(asyncio.to_thread, bench_decision, report=report),
        Part.LOAD: partial(
            bench_open_load, report=report, loads=plan.loads, seconds=plan.load_seconds
        ),
    }
    return ControlReport({part: await run[part]() for part in dict.fromkeys(plan.parts)})


async def _simulated(plan: ControlPlan, report: Report) -> PartReport:
    sizes = plan.batch_sizes
    return await asyncio.to_thread(
        bench_simulated,
        report=report,
        num_steps=plan.simulated_steps,
        keep=lambda world: sizes is None or world.num_sequences in sizes,
        seeds=plan.seeds,
    )
