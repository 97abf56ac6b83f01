"""What is written down while a cluster is simulated."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cluster.tools.simulation.engines import Job, SimulatedEngine, Totals
from cluster.tools.simulation.outcome import Change, Outcome, Sample
from cluster.tools.simulation.traffic import Traffic

MOST_SAMPLES = 512  # of the timeline: when there are more, every other one goes


class Record:
    """Of one trace."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._first = np.full(len(traffic), math.nan)
        self._last = np.full(len(traffic), math.nan)
        self._num_refused = 0
        self._num_moved = 0
        self._left = Totals()
        self._changes: list[Change] = []
        self._rounds: list[float] = []
        self._timeline: list[Sample] = []
        self._ticks, self._every = 0, 1
        self._ticked_at = 0.0
        self._target_seconds = 0.0
        self._draft_seconds = 0.0
        self.num_open = 0

    def opened(self) -> None:
        """A request was taken in."""
        self.num_open += 1

    def refused(self) -> None:
        """A request was turned away."""
        self._num_refused += 1

    def moved(self) -> None:
        """A request goes on at another engine."""
        self._num_moved += 1

    def ended(self, job: Job) -> None:
        """A request was served."""
        self.num_open -= 1
        self._first[job.index] = job.first_at
        self._last[job.index] = job.ended_at

    def changed(self, now: float, kind: str, before: int, after: int) -> None:
        """A number of replicas was decided on."""
        if before != after:
            self._changes.append(Change(now, kind, before, after))

    def round(self, seconds: float) -> None:
        """The slow loop took so long, on this machine."""
        self._rounds.append(seconds)

    def left(self, totals: Totals) -> None:
        """A replica ended, which had done so much."""
        self._left = _sum((self._left, totals))

    def tick(
        self,
        now: float,
        engines: Mapping[str, SimulatedEngine],
        *,
        num_targets: int,
        num_drafts: int,
    ) -> None:
        """Count hours, and now and then how things stand."""
        seconds = now - self._ticked_at
        self._ticked_at = now
        self._target_seconds += seconds * num_targets
        self._draft_seconds += seconds * num_drafts
        self._ticks += 1
        if self._ticks % self._every:
            return
        self._timeline.append(_sample(now, engines, num_drafts=num_drafts))
        if len(self._timeline) > MOST_SAMPLES:
            del self._timeline[::2]
            self._every *= 2

    def outcome(self, now: float, engines: Sequence[SimulatedEngine]) -> Outcome:
        """All of it."""
        totals = _sum((self._left, *(engine.advance_to(now) for engine in engines)))
        traffic = self._traffic
        served = ~np.isnan(self._last)
        outputs = traffic.outputs[served]
        later = np.maximum(outputs - 1, 1)
        return Outcome(
            trace=traffic.name,
            num_requests=len(traffic),
            num_served=int(served.sum()),
            num_refused=self._num_refused,
            num_moved=self._num_moved,
            seconds=now,
            tokens=int(outputs.sum()),
            first_seconds=(self._first - traffic.arrivals)[served],
            token_seconds=((self._last - self._first)[served] / later)[outputs > 1],
            target_hours=self._target_seconds / 3600,
            draft_hours=self._draft_seconds / 3600,
            mean_depth=totals.drafts / max(totals.tokens - totals.accepted, 1.0),
            acceptance_rate=totals.accepted / totals.drafts if totals.drafts else 0.0,
            changes=tuple(self._changes),
            timeline=tuple(self._timeline),
            round_seconds=np.array(self._rounds),
        )


def _sample(now: float, engines: Mapping[str, SimulatedEngine], *, num_drafts: int) -> Sample:
    guesses = [engine.guess for engine in engines.values()]
    drafts = sum(guess.drafts / guess.seconds for guess in guesses)
    accepted = sum(guess.accepted / guess.seconds for guess in guesses)
    tokens = sum(guess.tokens_per_second for guess in guesses)
    loads = [engine.load() for engine in engines.values()]
    return Sample(
        seconds=now,
        targets=len(engines),
        drafts=num_drafts,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        depth=drafts / (tokens - accepted) if tokens > accepted else 0.0,
        tokens_per_second=tokens,
    )


def _sum(parts: Sequence[Totals]) -> Totals:
    return Totals(
        tokens=sum(part.tokens for part in parts),
        drafts=sum(part.drafts for part in parts),
        accepted=sum(part.accepted for part in parts),
        steps=sum(part.steps for part in parts),
        busy_seconds=sum(part.busy_seconds for part in parts),
    )
