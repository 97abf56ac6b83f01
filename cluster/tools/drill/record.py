"""What faults did, and what a drill says of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Group
from rich.table import Table

from cluster.tools.drill.faults import FAULTS, LAST
from cluster.tools.drill.streams import Counts

LEGEND = (
    "next token: of the stream that waited longest. reconnected: its gateway went, with the "
    "connection; the client asked another, and compared from the first token on."
)
CUTS = {fault.name for fault in (*FAULTS.values(), LAST) if fault.cuts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One fault. Times are seconds from the moment it was injected.

    `pause_seconds` is the longest time that one of the streams went without a token, until the
    cluster was whole; `whole_seconds` is None when it never was.
    """

    name: str
    num_in_flight: int
    counts: Counts
    pause_seconds: float
    whole_seconds: float | None
    missing: str | None = None

    @property
    def broken(self) -> int:
        """Streams that ended with an error; connections that broke without being cut as well."""
        cut = self.name in CUTS
        return self.counts.broken + (0 if cut else self.counts.reconnected)

    @property
    def harmless(self) -> bool:
        """Whether no stream broke, and no token is missing or another."""
        return not (self.broken or self.counts.lost or self.counts.changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOutcome:
    """Of all faults. `messages` are the first errors that clients saw."""

    records: Sequence[Record]
    num_streams: int
    seconds: float
    counts: Counts
    messages: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether nobody was harmed, and the cluster recovered every time."""
        counts = self.counts  # of what ended after the last fault, too
        return not (counts.broken or counts.lost or counts.changed) and all(
            record.harmless and (record.whole_seconds is not None or record.name == LAST.name)
            for record in self.records
        )

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "faults": len(self.records),
            "streams": self.num_streams,
            "seconds": self.seconds,
            "answers": self.counts.ended,
            "tokens": self.counts.tokens,
            "passed": self.passed,
            "kinds": [
                {"name": name, **_figures(records)} for name, records in self._by_kind().items()
            ],
            "records": [asdict(record) for record in self.records],
            "messages": list(self.messages),
        }

    def __rich__(self) -> Group:
        return Group(self._table(), *self._notes())

    def _by_kind(self) -> dict[str, list[Record]]:
        kinds: dict[str, list[Record]] = {}
        for record in self.records:
            kinds.setdefault(record.name, []).append(record)
        return dict(sorted(kinds.items()))

    def _table(self) -> Table:
        title = (
            f"{len(self.records)} faults in {self.seconds / 60:.1f} min under {self.num_streams} "
            f"streams: {self.counts.ended:,} answers, {self.counts.tokens:,} tokens"
        )
        table = Table(title=title, title_justify="left")
        table.add_column("fault")
        for heading in (
            "injected",
            "in flight",
            "reconnected",
            "broken",
            "lost",
            "changed",
            "next token p50 / p95 s",
            "whole p50 / p95 s",
        ):
            table.add_column(heading, justify="right")
        rows = self._by_kind()
        for name, records in rows.items():
            table.add_row(name, *_cells(records))
        if len(rows) > 1:
            table.add_section()
            table.add_row("all", *_cells(self.records))
        return table

    def _notes(self) -> list[str]:
        notes = [LEGEND]
        notes += [
            f"{each.name}: not whole again: {each.missing}"
            for each in self.records
            if each.missing is not None
        ]
        notes += self.messages if not self.passed else []
        return [*notes, "passed" if self.passed else "FAILED"]


def _figures(records: Sequence[Record]) -> dict[str, float | int | None]:
    """Of some faults together."""
    whole = [each.whole_seconds for each in records if each.whole_seconds is not None]
    pauses = [each.pause_seconds for each in records]
    return {
        "injected": len(records),
        "least_in_flight": min(each.num_in_flight for each in records),
        "turned_away": sum(each.counts.turned_away for each in records),
        "reconnected": sum(each.counts.reconnected for each in records),
        "broken": sum(each.broken for each in records),
        "lost": sum(each.counts.lost for each in records),
        "changed": sum(each.counts.changed for each in records),
        "pause_p50": _percentile(pauses, 50),
        "pause_p95": _percentile(pauses, 95),
        "whole_p50": _percentile(whole, 50),
        "whole_p95": _percentile(whole, 95),
    }


def _cells(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    figures = _figures(records)
    counted = ("injected", "least_in_flight", "reconnected", "broken", "lost", "changed")
    return [
        *(f"{figures[name]}" for name in counted),
        _pair(figures["pause_p50"], figures["pause_p95"]),
        _pair(figures["whole_p50"], figures["whole_p95"]),
    ]


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _pair(median: float | None, most: float | None) -> str:
    return "-" if median is None or most is None else f"{median:.2f} / {most:.2f}"
