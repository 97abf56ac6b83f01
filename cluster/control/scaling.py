"""How many replicas there should be: targets, draft workers, gateways.

Each scaler looks at what the replicas say of themselves and names a number, now and then another.

targets   as many as carry the demand in tokens a second at measured capacity, and hold the
          expected delay of the queue. How far is guessed is the first lever: while drafts are
          still becoming fewer the number of replicas stays as it is
drafts    as many as bring what they cost, each next one less than the one before
gateways  by open streams

Standard library only, and what is beside it here: a policy of Serve's runs in its controller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from cluster.control.assignment import PoolHint
from cluster.control.damper import Damper, Limits
from cluster.control.demand import DemandWindow, MeasuredCapacity, Smooth, TargetLoad, mean
from cluster.control.leases import Claim

HYSTERESIS = 0.15  # of demand: must fit besides before one goes, be missing before one comes
LEAST_SEQUENCES = 0.5  # that a worker serves, however late it is
LOW_DEPTH = 0.25  # drafts a sequence and step: fewer, and there is nothing left to save
PATIENCE_WINDOWS = 3.0  # for so long guessing less may stand in for a replica
MOST_ANTICIPATED = 0.5  # of the demand
NEARLY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingLoad:
    """What the engines of a pool make of it, in numbers that any of its workers can report.

    `demand` sequences are drafted for, `worth` is the tokens a second that drafts bring one of
    them, a worker serves `sequences` of them, and of the engines' steps that asked for drafts the
    part `late_ratio` had none in time. A target gives `target_tokens` a second.
    """

    demand: float
    worth: float
    sequences: float
    late_ratio: float
    target_tokens: float

    @classmethod
    def of(cls, hint: PoolHint) -> Self:
        """As the router tells it."""
        return cls(
            demand=hint.claim.demand,
            worth=hint.claim.worth,
            sequences=hint.claim.sequences,
            late_ratio=hint.late_ratio,
            target_tokens=hint.tokens_per_second / max(hint.num_engines, 1),
        )


class TargetScaler:
    """How many targets. Of one deployment; asked again and again with a time that never falls.

    `utilization` is the part of the capacity that is planned with, `target_delay_seconds` how
    long a request may be expected to wait.
    """

    def __init__(
        self, limits: Limits, *, target_delay_seconds: float = 1.0, utilization: float = 0.8
    ) -> None:
        self._limits = limits
        self._damper = Damper(limits)
        self._delay_seconds = target_delay_seconds
        self._utilization = utilization
        self._window = DemandWindow(self._limits.upscale_delay_seconds)
        self._capacity = MeasuredCapacity()
        self._helping_since: float | None = None
        self._delayed_since: float | None = None

    def desired(self, loads: Sequence[TargetLoad], *, current: int, now: float) -> int:
        """The number from now on; `current` was named last, and so many `loads` are there."""
        if not loads:
            return self._damper.settle(current, current=current, ready=0, now=now)
        self._capacity.observe(loads, now=now)
        self._window.add(
            now,
            rate=sum(load.tokens_per_second for load in loads),
            backlog=sum(load.waiting_tokens for load in loads),
            depth=sum(load.depth for load in loads) / len(loads),
        )
        proposal = self._proposal(loads, current=current, now=now)
        return self._damper.settle(proposal, current=current, ready=len(loads), now=now)

    def _proposal(self, loads: Sequence[TargetLoad], *, current: int, now: float) -> int:
        usable = self._utilization * self._capacity.tokens_per_second
        if usable <= 0:
            return current
        delayed = self._delayed_for(loads, now=now)
        demand = self._window.demand
        asked = demand + self._anticipated(demand)
        needed = current if asked <= current * usable * (1 + HYSTERESIS) else _ceil(asked / usable)
        if delayed >= self._limits.upscale_delay_seconds and not self._window.backlog_falls:
            needed = max(needed, current + 1)
        if needed > current:
            return current if self._guessing_helps(delayed, now=now) else needed
        self._helping_since = None
        if delayed:
            return current
        return min(current, _ceil(demand * (1 + HYSTERESIS) / usable))

    def _delayed_for(self, loads: Sequence[TargetLoad], *, now: float) -> float:
        """Seconds for which requests were to wait longer than they should, without a break."""
        backlog = sum(load.waiting_tokens for load in loads)
        seconds = backlog / (self._capacity.tokens_per_second * len(loads))
        if seconds <= self._delay_seconds:
            self._delayed_since = None
            return 0.0
        if self._delayed_since is None:
            self._delayed_since = now
        return max(now - self._delayed_since, NEARLY)

    def _anticipated(self, demand: float) -> float:
        """What demand will have grown by when the next change is possible."""
        ahead = 2 * self._limits.upscale_delay_seconds
        return min(max(self._window.slope, 0.0) * ahead, MOST_ANTICIPATED * demand)

    def _guessing_helps(self, delayed: float, *, now: float) -> bool:
        """Whether drafts are becoming fewer, which makes room: not while requests wait long."""
        helps = self._window.depth > LOW_DEPTH and self._window.depth_falls
        if not helps or delayed >= self._limits.upscale_delay_seconds:
            self._helping_since = None
            return False
        if self._helping_since is None:
            self._helping_since = now
        patience = PATIENCE_WINDOWS * self._limits.upscale_delay_seconds
        return now - self._helping_since < patience


class DraftScaler:
    """How many draft workers of a pool: each next one must bring what it costs.

    `cost_ratio` is what a worker costs next to a target: it must bring as much of a target's
    tokens. A worker whose drafts come late serves fewer sequences than it holds.
    """

    def __init__(self, limits: Limits, *, cost_ratio: float = 0.05) -> None:
        self._limits = limits
        self._damper = Damper(limits)
        self._cost_ratio = cost_ratio
        self._seen = {field.name: Smooth() for field in fields(DraftingLoad)}

    def desired(self, loads: Sequence[DraftingLoad], *, current: int, now: float) -> int:
        """The number from now on; `current` was named last, and so many `loads` are there."""
        if not loads:
            return self._damper.settle(current, current=current, ready=0, now=now)
        seconds = self._limits.upscale_delay_seconds / 2
        usual = DraftingLoad(
            **{
                name: seen.follow(
                    mean([getattr(load, name) for load in loads]), now=now, seconds=seconds
                )
                for name, seen in self._seen.items()
            }
        )
        proposal = self._worthwhile(usual, 1 + HYSTERESIS)
        if proposal <= current:
            proposal = min(current, self._worthwhile(usual, 1 - HYSTERESIS))
        return self._damper.settle(proposal, current=current, ready=len(loads), now=now)

    def _worthwhile(self, load: DraftingLoad, factor: float) -> int:
        """So many workers of which the last one brings `factor` times its cost."""
        cost = factor * self._cost_ratio * load.target_tokens
        in_time = max(load.sequences * (1 - load.late_ratio), LEAST_SEQUENCES)
        claim = Claim(load.demand, load.worth, in_time)
        number = self._limits.min_replicas
        while number < self._limits.max_replicas and claim.marginal(number) > cost:
            number += 1
        return number


class GatewayScaler:
    """How many gateways: each has about `target_streams` streams open."""

    def __init__(self, limits: Limits, *, target_streams: float = 200.0) -> None:
        self._damper = Damper(limits)
        self._target_streams = target_streams

    def desired(self, streams: Sequence[float], *, current: int, now: float) -> int:
        """The number from now on, given the open streams of each."""
        needed = sum(streams) / self._target_streams
        proposal = _ceil(needed)
        if proposal < current:
            proposal = min(current, _ceil(needed * (1 + HYSTERESIS)))
        if not streams:
            proposal = current
        return self._damper.settle(proposal, current=current, ready=len(streams), now=now)


def _ceil(value: float) -> int:
    return math.ceil(value - NEARLY)
