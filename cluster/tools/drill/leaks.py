"""Whether anything grows: samples of every process over time, and the cluster at rest."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from cluster.tools.drill.faults import Part
from cluster.tools.drill.processes import Measure
from cluster.tools.page import Page

MIB = 2**20
WARM_SHARE = 1 / 3  # of a process's samples, while caches and allocators fill
LEAST_SAMPLES = 15
GROWTH_BYTES = 16 * MIB  # over what was watched: less is noise
GROWTH_SHARE = 0.05  # of its memory
SURE = 4.0  # standard errors that a slope is to be from zero
DESCRIPTORS = 6  # of a process, more or less: connections that are open for a moment


@dataclass(frozen=True, slots=True)
class Trend:
    """How a process's memory changed: bytes a second, by least squares over `seconds`."""

    part: Part
    pid: int
    seconds: float
    memory: float  # in the middle
    slope: float
    error: float  # standard, of the slope

    @property
    def grows(self) -> bool:
        """Whether it is more than noise."""
        allowed = max(GROWTH_BYTES, GROWTH_SHARE * self.memory)
        return self.slope * self.seconds > allowed and self.slope > SURE * self.error


def trend_of(part: Part, pid: int, times: Iterable[float], memories: Iterable[float]) -> Trend:
    """The trend through at least three points, after a part in which everything may grow."""
    x, y = np.asarray(list(times)), np.asarray(list(memories))
    first = int(len(x) * WARM_SHARE)
    x, y = x[first:], y[first:]
    centred = x - x.mean()
    spread = float(np.sum(centred**2)) or 1.0
    slope = float(np.sum(centred * (y - y.mean())) / spread)
    rest = y - y.mean() - slope * centred
    error = float(np.sqrt(np.sum(rest**2) / max(len(x) - 2, 1) / spread))
    return Trend(part, pid, float(x[-1] - x[0]), float(np.median(y)), slope, error)


@dataclass
class Samples:
    """Memory of every process there was, by the time it was looked at."""

    _points: dict[tuple[Part, int], list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, seconds: float, measures: Iterable[Measure]) -> None:
        """Note all processes at one moment."""
        for each in measures:
            self._points.setdefault((each.part, each.pid), []).append((seconds, each.memory))

    def trends(self) -> list[Trend]:
        """Of the processes that were watched long enough."""
        return [
            trend_of(part, pid, *zip(*points, strict=True))
            for (part, pid), points in self._points.items()
            if len(points) >= LEAST_SAMPLES
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The cluster while nobody asks: `descriptors` is the mean of a part's processes."""

    running: float
    waiting: float
    kv_usage: float  # of the fullest engine
    draft_sequences: float
    processes: Mapping[str, int]
    descriptors: Mapping[str, float]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for anybody."""
        return not (self.running or self.waiting or self.kv_usage or self.draft_sequences)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def rest_of(page: Page, measures: Iterable[Measure]) -> Rest:
    """What a page of metrics and the processes say of a moment."""
    by_part: dict[str, list[int]] = {}
    for each in measures:
        by_part.setdefault(each.part.value, []).append(each.descriptors)
    return Rest(
        running=page.total("drafthouse_sequences", state="running"),
        waiting=page.total("drafthouse_sequences", state="waiting"),
        kv_usage=page.most("drafthouse_kv_usage_ratio"),
        draft_sequences=page.total("drafthouse_draft_sequences"),
        processes={part: len(each) for part, each in by_part.items()},
        descriptors={part: sum(each) / len(each) for part, each in by_part.items()},
    )


def leaks(before: Rest, after: Rest, trends: Iterable[Trend]) -> list[str]:
    """What did not come back to where it began."""
    held = {
        "sequences run": after.running,
        "sequences wait": after.waiting,
        "KV memory in use": after.kv_usage,
        "sequences in draft workers": after.draft_sequences,
    }
    found = [f"{what}: {value:g}" for what, value in held.items() if value]
    found += [
        f"processes, {part}: {old} before, {new} after"
        for part in sorted({*before.processes, *after.processes})
        if (old := before.processes.get(part, 0)) != (new := after.processes.get(part, 0))
    ]
    found += [
        f"descriptors, {part}: {before.descriptors[part]:.1f} before, {count:.1f} after"
        for part, count in after.descriptors.items()
        if count > before.descriptors.get(part, count) + DESCRIPTORS
    ]
    found += [
        f"memory, {trend.part} {trend.pid}: {trend.slope * 60 / MIB:.2f} MiB a minute"
        for trend in trends
        if trend.grows
    ]
    return found
