"""What came of a simulated cluster."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

FloatArray = NDArray[np.float64]

PERCENTILES = (50, 90, 99)
SHOWN_CHANGES = 40


@dataclass(frozen=True, slots=True)
class Change:
    """Another number of replicas was decided on."""

    seconds: float
    kind: str
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The cluster at one moment: those that serve, drafts a sequence and step, tokens a second."""

    seconds: float
    targets: int
    drafts: int
    running: int
    waiting: int
    depth: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a whole trace. Times are of the simulated cluster, but for those of the slow loop.

    `first_seconds` and `token_seconds` (to the first token, and of each later one) have an entry
    for every served request, in the order of arrival.
    """

    trace: str
    num_requests: int
    num_served: int
    num_refused: int
    num_moved: int  # handed over by a replica that was to end
    seconds: float
    tokens: int
    first_seconds: FloatArray
    token_seconds: FloatArray
    target_hours: float
    draft_hours: float
    mean_depth: float
    acceptance_rate: float
    changes: Sequence[Change]
    timeline: Sequence[Sample]
    round_seconds: FloatArray  # of the router's slow loop, on this machine

    @property
    def goodput(self) -> float:
        """Tokens of served requests a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "trace": self.trace,
            "requests": self.num_requests,
            "served": self.num_served,
            "refused": self.num_refused,
            "moved": self.num_moved,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.goodput,
            "first_token_seconds": _percentiles(self.first_seconds),
            "token_seconds": _percentiles(self.token_seconds),
            "target_hours": self.target_hours,
            "draft_hours": self.draft_hours,
            "mean_drafts": self.mean_depth,
            "acceptance_rate": self.acceptance_rate,
            "slow_loop": {
                "rounds": len(self.round_seconds),
                "mean_seconds": float(self.round_seconds.mean()) if len(self.round_seconds) else 0,
                "most_seconds": float(self.round_seconds.max(initial=0.0)),
            },
            "changes": [asdict(change) for change in self.changes],
            "timeline": [asdict(sample) for sample in self.timeline],
        }

    def __rich__(self) -> Group:
        return Group(self._summary(), self._changes())

    def _summary(self) -> Table:
        table = Table(title=f"Simulated: {self.trace}", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        rounds = self.round_seconds * 1e3
        rows = {
            "requests": f"{self.num_requests:,}",
            "served / refused / moved": (
                f"{self.num_served:,} / {self.num_refused:,} / {self.num_moved:,}"
            ),
            "time": f"{self.seconds / 3600:.2f} h",
            "goodput": f"{self.goodput:,.1f} tokens/s",
            "first token, p50 / p90 / p99": _shown(self.first_seconds, 1.0, "s"),
            "each later token, p50 / p90 / p99": _shown(self.token_seconds, 1e3, "ms"),
            "target replicas": f"{self.target_hours:,.2f} h",
            "draft replicas": f"{self.draft_hours:,.2f} h",
            "drafts a sequence and step": f"{self.mean_depth:.2f}",
            "drafts kept": f"{self.acceptance_rate:.0%}",
            "slow loop, mean / most": (
                f"{rounds.mean():.1f} / {rounds.max():.1f} ms of {len(rounds)} rounds"
                if len(rounds)
                else "-"
            ),
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def _changes(self) -> Table:
        title = f"{len(self.changes)} changes"
        if len(self.changes) > SHOWN_CHANGES:
            title += f", the first {SHOWN_CHANGES}"
        table = Table(title=title, title_justify="left")
        for heading in ("at", "of", "from", "to"):
            table.add_column(heading, justify="left" if heading == "of" else "right")
        for change in self.changes[:SHOWN_CHANGES]:
            table.add_row(
                f"{change.seconds:,.0f} s", change.kind, str(change.before), str(change.after)
            )
        return table


def _percentiles(values: FloatArray) -> dict[str, float | None]:
    return {
        f"p{percent}": float(np.percentile(values, percent)) if len(values) else None
        for percent in PERCENTILES
    }


def _shown(values: FloatArray, factor: float, unit: str) -> str:
    if not len(values):
        return "-"
    numbers = (f"{factor * float(np.percentile(values, p)):.2f}" for p in PERCENTILES)
    return f"{' / '.join(numbers)} {unit}"
