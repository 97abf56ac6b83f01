"""Simulated draft workers: how busy they are, and what that does to the engines they serve.

A worker makes the drafts of a step position by position, for all its sequences at once. While it
has time left, drafts are made while the target verifies, and a step waits only for those that
follow a rejected one, and for the worker's other engines. When it has none, drafts come too late.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.messages import DraftLoad
from cluster.tools.simulation.engines import SimulatedEngine
from cluster.tools.simulation.guessing import LATE_LEVELS, wait_level

MOST_BUSY = 0.95  # of the time: beyond, queues are as long as drafts are not yet late
SMOOTHING = 0.5  # of what is new in a round, since engines guess otherwise once they hear of it


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Seconds of one position of a draft: for one sequence, and for each one more."""

    seconds: float = 5e-3
    sequence_seconds: float = 0.3e-3


class SimulatedDrafts:
    """All draft workers of a cluster, by worker id."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._busy: dict[str, float] = {}  # worker-seconds a second that are asked of each
        self._waits: dict[str, float] = {}
        self._late: dict[str, float] = {}

    def settle(
        self,
        engines: Mapping[str, SimulatedEngine],
        leases: Mapping[str, Sequence[str]],
        workers: Sequence[str],
    ) -> None:
        """Tell every engine how late its drafts are and how long it waits, with these leases."""
        seconds = {engine_id: self._step(engine) for engine_id, engine in engines.items()}
        self._busy = dict.fromkeys(workers, 0.0)
        for engine_id, engine in engines.items():
            leased = [each for each in leases.get(engine_id, ()) if each in self._busy]
            for worker in leased:
                share = seconds[engine_id] / len(leased)
                self._busy[worker] += share / engine.guess.seconds
        for engine_id, engine in engines.items():
            leased = [each for each in leases.get(engine_id, ()) if each in self._busy]
            if not leased:
                engine.late, engine.wait = LATE_LEVELS, 0
                continue
            busy = sum(self._busy[worker] for worker in leased) / len(leased)
            late = self._smooth(self._late, engine_id, max(1 - 1 / busy, 0.0) if busy > 1 else 0.0)
            wait = self._wait(engine, len(leased), min(busy, MOST_BUSY))
            engine.late = round(LATE_LEVELS * late)
            engine.wait = wait_level(self._smooth(self._waits, engine_id, wait))

    def worker_loads(
        self,
        workers: Sequence[str],
        engines: Mapping[str, SimulatedEngine],
        leases: Mapping[str, Sequence[str]],
    ) -> dict[str, DraftLoad | None]:
        """What every worker tells the router; one that is new tells nothing yet."""
        sequences = dict.fromkeys(workers, 0.0)
        for engine_id, engine in engines.items():
            leased = leases.get(engine_id, ())
            for worker in leased:
                if worker in sequences:
                    sequences[worker] += engine.load().running / len(leased)
        return {
            worker: DraftLoad(
                num_sequences=round(sequences[worker]), busy_ratio=min(self._busy[worker], 1.0)
            )
            if worker in self._busy
            else None
            for worker in workers
        }

    def _step(self, engine: SimulatedEngine) -> float:
        """Worker-seconds that an engine's step takes."""
        depth = engine.guess.depth
        return depth * self._position(engine.guess.drafts / depth) if depth else 0.0

    def _position(self, num_sequences: float) -> float:
        costs = self._costs
        return costs.seconds + costs.sequence_seconds * max(num_sequences - 1, 0.0)

    def _wait(self, engine: SimulatedEngine, num_workers: int, busy: float) -> float:
        """What a step waits for each position: for those made anew, and for other engines."""
        drafts = engine.guess.drafts
        rejected = 1 - engine.guess.accepted / drafts if drafts else 1.0
        seconds = self._position(engine.load().running / num_workers)
        return seconds * (rejected + busy / (2 * (1 - busy)))

    @staticmethod
    def _smooth(kept: dict[str, float], engine_id: str, value: float) -> float:
        kept[engine_id] = smooth = kept.get(engine_id, 0.0) * (1 - SMOOTHING) + value * SMOOTHING
        return smooth
