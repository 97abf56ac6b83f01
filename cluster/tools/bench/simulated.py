"""Part (b): the controller and the policies it is compared with, in worlds whose truth is known."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich.table import Table

from cluster.tools.bench.page import Bars, Section, Sheet
from cluster.tools.bench.progress import Report
from cluster.tools.simulation.run import NUM_STEPS, Cell, compare, worlds
from cluster.tools.simulation.worlds import World


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Every world of a run; goodputs are parts of what could be had at most."""

    cells: tuple[Cell, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [
            {
                "table": cell.world.table,
                "process": cell.world.process,
                "num_sequences": cell.world.num_sequences,
                "seed": cell.world.seed,
                "first_steps_to_optimum": cell.early,
                "warm_to_optimum": cell.warm,
                "others_to_optimum": dict(cell.others),
                "to_best_other": cell.warm / max(cell.others.values()),
                "mean_draft_rows": cell.mean_rows,
                "calibration_error": cell.calibration_error,
            }
            for cell in self.cells
        ]

    def __rich__(self) -> Table:
        title = "Simulated: goodput as a part of the exhaustive optimum"
        table = Table(title=title, title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in TEXTS else "right")
        for same in self.by_world():
            table.add_row(*cells(same))
        return table

    def by_world(self) -> list[list[Cell]]:
        """Those apart that differ in more than their seed."""
        groups: dict[tuple[str, str, int], list[Cell]] = {}
        for cell in self.cells:
            world = cell.world
            key = (world.table, world.process, world.num_sequences)
            groups.setdefault(key, []).append(cell)
        return list(groups.values())

    def section(self) -> Section:
        """For a page."""
        groups: dict[str, dict[str, float]] = {}
        for table in dict.fromkeys(cell.world.table for cell in self.cells):
            own = [cell for cell in self.cells if cell.world.table == table]
            groups[table] = {"controller": min(cell.warm for cell in own)} | {
                name: min(cell.others[name] for cell in own) for name in own[0].others
            }
        title = "The worst of all acceptance processes and batch sizes"
        return Section(
            "Simulated",
            "Cost tables and acceptance processes whose truth is known: what each policy brings, "
            "as a part of what can be had by who knows that truth.",
            (Sheet(HEADINGS, [cells(same) for same in self.by_world()]),),
            (Bars(title, "part of the optimum", groups, reference=1.0),),
        )


TEXTS = ("table", "acceptance", "best other")
HEADINGS = (
    "table",
    "acceptance",
    "sequences",
    "first steps",
    "warm",
    "best other",
    "it brings",
    "to it",
    "noise",
    "draft rows each",
    "calibration error",
)


def cells(same: Sequence[Cell]) -> tuple[str, ...]:
    """A row of the table, under HEADINGS: means over seeds, and the standard error of `to it`."""
    world = same[0].world
    others = {name: fmean(cell.others[name] for cell in same) for name in same[0].others}
    best = max(others, key=others.__getitem__)
    to_it = [cell.warm / cell.others[best] for cell in same]
    return (
        world.table,
        world.process,
        str(world.num_sequences),
        f"{fmean(cell.early for cell in same):.3f}",
        f"{fmean(cell.warm for cell in same):.3f}",
        best,
        f"{others[best]:.3f}",
        f"{fmean(to_it):.3f}x",
        f"{stdev(to_it) / math.sqrt(len(to_it)):.3f}" if len(to_it) > 1 else "",
        f"{fmean(cell.mean_rows for cell in same):.2f}",
        f"{fmean(cell.calibration_error for cell in same):.3f}",
    )


def bench_simulated(
    *,
    report: Report,
    num_steps: int = NUM_STEPS,
    keep: Callable[[World], bool] = lambda _: True,
    seeds: Sequence[int] = (0,),
) -> SimulationReport:
    """Play the worlds that `keep` keeps, all of them if not said otherwise, with every seed."""
    played = [world for seed in seeds for world in worlds(seed=seed) if keep(world)]
    found: list[Cell] = []
    for count, world in enumerate(played):
        report("simulated", count, len(played))
        found.append(compare(world, num_steps=num_steps))
    report("simulated", len(played), len(played))
    return SimulationReport(tuple(found))
