"""A profile as a picture: where steps are flat, where they are not, and what K brings at that."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.control.policy import StepShape
from cluster.errors import MissingExtra
from cluster.profiling.steps import CONTEXTS
from cluster.tools.profile import ACCEPTANCES, ProfileReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = ("-", "--", ":")  # by acceptance


def draw_profile(report: ProfileReport, path: Path) -> None:
    """Write a PNG. Raises MissingExtra when there is nothing to draw with."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to load
    except ImportError as error:
        raise MissingExtra(extra="plot", purpose="drawing a profile") from error
    figure = Figure(figsize=(13, 5), layout="constrained")
    steps, rates = figure.subplots(1, 2)
    figure.suptitle(f"{report.model}, {report.key.dtype}, {report.key.processor}")
    _draw_steps(steps, report)
    _draw_rates(rates, report)
    figure.savefig(path, format="png", dpi=110)


def _draw_steps(axes: "Axes", report: ProfileReport) -> None:
    """Milliseconds against all rows of a step: measured, and as the table has it."""
    most = report.key.max_num_speculative_tokens
    for color, batch in enumerate(report.batches):
        near = {
            shape.num_rows: seconds * 1000
            for shape, seconds in sorted(
                report.table.points.items(), key=lambda item: -item[0].num_context_tokens
            )
            if shape.num_sequences == batch  # of equal rows the one with the shorter context stays
        }
        shape = StepShape(
            num_sequences=batch, num_rows=batch, num_context_tokens=batch * CONTEXTS[0]
        )
        extra = np.arange(batch * most + 1)
        axes.plot(batch + extra, report.table.seconds(shape, extra) * 1000, f"C{color}-", lw=1)
        axes.plot(list(near), list(near.values()), f"C{color}o", label=f"{batch} at once")
    if report.ridge is not None:
        axes.axvline(report.ridge, color="grey", ls=":")
        axes.text(report.ridge, 0, f" ridge {report.ridge:.0f}", rotation=90, va="bottom")
    axes.set(xlabel="rows of a step", ylabel="ms", title="Step time", xscale="log", ylim=(0, None))
    axes.legend()


def _draw_rates(axes: "Axes", report: ProfileReport) -> None:
    """Tokens per second of all sequences against K, drafts being free."""
    colors = {batch: f"C{color}" for color, batch in enumerate(report.batches)}
    lines = dict(zip(ACCEPTANCES, LINES, strict=True))
    for each in report.expected:
        label = f"{each.num_sequences} at once, {each.acceptance:g} accepted"
        style = lines[each.acceptance]
        axes.plot(each.rates, colors[each.num_sequences] + style, label=label)
        axes.plot(each.best, each.rates[each.best], colors[each.num_sequences] + "o", ms=4)
    axes.set(xlabel="K", ylabel="tokens/s", title="What drafts bring", yscale="log")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
