"""What is known of a cluster when somebody asks whether its targets should speculate."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a target step by its rows: straight between the points, which never fall."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Self:
        """The same of measured points, in any order. Raises ValueError without any."""
        rising: list[tuple[float, float]] = []
        for rows, seconds in sorted(points):
            rising.append((rows, max(seconds, rising[-1][1] if rising else 0.0)))
        if not rising:
            raise ValueError("no step was measured")
        return cls(tuple(rising))

    def seconds(self, num_rows: float) -> float:
        """Of a step of so many rows; beyond the last point as steep as before it."""
        points = self.points
        if len(points) == 1 or num_rows <= points[0][0]:
            return points[0][1]
        place = min(bisect_left(points, (num_rows, 0.0)), len(points) - 1)
        (rows, seconds), (more_rows, more_seconds) = points[place - 1], points[place]
        slope = (more_seconds - seconds) / (more_rows - rows)
        return seconds + slope * (num_rows - rows)

    @property
    def floor_seconds(self) -> float:
        """Of a single row: what reading the weights takes."""
        return self.seconds(1)

    @property
    def row_seconds(self) -> float:
        """Of one row more, where there are many."""
        last = self.points[-1][0]
        return self.seconds(last + 1) - self.seconds(last)


class Place(StrEnum):
    """Where a drafter runs."""

    IN_PROCESS = "in_process"  # of the engine, on what the target computes with
    WORKERS = "workers"  # of a pool, anywhere in the cluster
    COLOCATED = "colocated"  # workers beside each target


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """One drafter. A step waits `wait_seconds` for it, and `token_seconds` more for each position.

    `survival` is the chance that a draft is kept up to that position, empty if none was verified;
    `coverage` the part of the sequences that were asked which brought any. `exchange_seconds` are
    those that a worker computes, and `memory_bytes` what it takes beside the target if it is there.
    """

    name: str
    survival: tuple[float, ...] = ()
    coverage: float = 1.0
    wait_seconds: float = 0.0
    token_seconds: float = 0.0
    place: Place = Place.IN_PROCESS
    exchange_seconds: float = 0.0
    late_ratio: float = 0.0
    num_workers: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All engines of a model, on average over some time; what nobody has said is None.

    `running` and `waiting` are sequences of one engine, `prompt_tokens` those that had to be
    computed of a request, `utilisation` the part of the time in which a target computes.
    """

    model: str
    num_engines: int = 1
    max_num_seqs: int = 16
    most_depth: int = 8
    running: float | None = None
    waiting: float | None = None
    queue_seconds: float | None = None
    utilisation: float | None = None
    step_seconds: float | None = None
    costs: StepCosts | None = None
    prompt_tokens: float | None = None
    answer_tokens: float | None = None
    kv_usage: float | None = None
    preemptions_per_request: float | None = None
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    available_bytes: int | None = None
    drafters: tuple[DrafterFacts, ...] = ()
