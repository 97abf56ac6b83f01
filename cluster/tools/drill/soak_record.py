"""What a soak says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Group
from rich.table import Table

from cluster.tools.drill.leaks import MIB, Rest, Trend
from cluster.tools.drill.mix import Sort
from cluster.tools.drill.open_load import End, Ended

REFUSAL_SECONDS = 0.05  # that 99 of 100 refusals take at most
LEAST_MET = 0.95  # of the deadlines of accepted requests; faults may cost the others


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOutcome:
    """Of all requests, and the cluster before and after. `capacity` is requests a second."""

    seconds: float
    load: float
    capacity: float
    ended: Sequence[Ended]
    faults: Sequence[str]
    before: Rest
    after: Rest
    trends: Sequence[Trend]
    leaks: Sequence[str]
    messages: Sequence[str] = ()

    @property
    def num_wrong(self) -> int:
        """Tokens lost or changed."""
        return sum(each.num_wrong for each in self.ended)

    @property
    def unexpected(self) -> int:
        """Requests that ended as such a request must not; without faults none loses its gateway."""
        return sum(
            not each.expected or (each.end is End.DISCONNECTED and not self.faults)
            for each in self.ended
        )

    @property
    def passed(self) -> bool:
        """Whether every client saw what it had to, and nothing leaked."""
        return not (self.num_wrong or self.unexpected or self.leaks or self.complaints)

    @property
    def complaints(self) -> list[str]:
        """Of requests that were refused too slowly, or taken and then not answered in time."""
        late = _percentile(self.refusal_seconds, 99) or 0.0
        met = 1.0 if self.deadlines_met is None else self.deadlines_met
        found = {
            f"of refusals one in a hundred takes {1e3 * late:.0f} ms": late > REFUSAL_SECONDS,
            f"only {met:.1%} of the deadlines of accepted requests are met": met < LEAST_MET,
        }
        return [complaint for complaint, holds in found.items() if holds]

    @property
    def refusal_seconds(self) -> list[float]:
        """What each refusal took."""
        return [each.seconds for each in self.ended if each.end is End.REFUSED]

    @property
    def deadlines_met(self) -> float | None:
        """The share of accepted requests with a deadline that were answered before it."""
        ends = [each.end for each in self.ended if each.sort is Sort.DEADLINE]
        accepted = [end for end in ends if end in {End.ANSWERED, End.LATE}]
        return accepted.count(End.ANSWERED) / len(accepted) if accepted else None

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "seconds": self.seconds,
            "load": self.load,
            "capacity_per_second": self.capacity,
            "requests": len(self.ended),
            "ends": {f"{sort} {end}": count for (sort, end), count in self._ends().items()},
            "tokens_wrong": self.num_wrong,
            "unexpected": self.unexpected,
            "refusal_seconds": {
                f"p{percent}": _percentile(self.refusal_seconds, percent) for percent in (50, 99)
            },
            "deadlines_met": self.deadlines_met,
            "faults": list(self.faults),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "memory": [asdict(trend) for trend in self.trends],
            "leaks": list(self.leaks),
            "complaints": self.complaints,
            "messages": list(self.messages),
            "passed": self.passed,
        }

    def __rich__(self) -> Group:
        lines = [f"leak: {leak}" for leak in self.leaks] + [*self.complaints, *self.messages]
        verdict = "passed" if self.passed else "FAILED"
        return Group(self._summary(), self._requests(), self._processes(), *lines, verdict)

    def _ends(self) -> dict[tuple[Sort, End], int]:
        return dict(sorted(Counter((each.sort, each.end) for each in self.ended).items()))

    def _summary(self) -> Table:
        title = (
            f"{self.seconds / 60:.1f} min at {self.load:g} times the capacity of "
            f"{self.capacity:.1f} requests/s"
        )
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        met = self.deadlines_met
        rows = {
            "requests": f"{len(self.ended):,}",
            "tokens lost or changed": str(self.num_wrong),
            "ended as they must not": str(self.unexpected),
            "refusals p50 / p99": _milliseconds(self.refusal_seconds),
            "deadlines met, of those accepted": "-" if met is None else f"{met:.1%}",
            "faults": ", ".join(self.faults) or "none",
            "running / waiting after": f"{self.after.running:g} / {self.after.waiting:g}",
            "KV memory in use after": f"{self.after.kv_usage:.1%}",
            "sequences in draft workers after": f"{self.after.draft_sequences:g}",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def _requests(self) -> Table:
        table = Table(title="requests, by what clients did", title_justify="left")
        table.add_column("client")
        for end in End:
            table.add_column(end.value, justify="right")
        ends = self._ends()
        for sort in Sort:
            table.add_row(sort.value, *(str(ends.get((sort, end), 0)) for end in End))
        return table

    def _processes(self) -> Table:
        table = Table(title="processes, before and after", title_justify="left")
        table.add_column("part")
        for heading in ("number", "descriptors", "memory MiB", "MiB a minute, of the worst"):
            table.add_column(heading, justify="right")
        for part, number in self.before.processes.items():
            trends = [trend for trend in self.trends if trend.part == part]
            worst = max(trends, key=lambda trend: trend.slope, default=None)
            after = self.after
            table.add_row(
                part,
                f"{number} / {after.processes.get(part, 0)}",
                f"{self.before.descriptors[part]:.0f} / {after.descriptors.get(part, 0):.0f}",
                f"{worst.memory / MIB:.0f}" if worst else "-",
                f"{worst.slope * 60 / MIB:+.2f} ± {worst.error * 60 / MIB:.2f}" if worst else "-",
            )
        return table


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _milliseconds(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = (1e3 * float(np.percentile(values, percent)) for percent in (50, 99))
    return f"{low:.1f} / {high:.1f} ms of {len(values):,}"
