"""Between wanting another number of replicas and having it: some time, so that changes are few."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Between how many, and for how long a change must have been wanted."""

    min_replicas: int = 1
    max_replicas: int = 1
    upscale_delay_seconds: float = 10.0
    downscale_delay_seconds: float = 120.0


class Damper:
    """Few changes of what is proposed all the time.

    Up: to what is proposed now, once more than there are was proposed for the upscale delay
    without a break, and everyone who was asked for last is there. Down: to the most that was
    proposed in the downscale delay.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._above_since: float | None = None
        self._below: deque[tuple[float, int]] = deque()  # times rise, proposals fall
        self._steady_since: float | None = None

    def settle(self, proposal: int, *, current: int, ready: int, now: float) -> int:
        """The number from now on."""
        limits = self._limits
        proposal = max(limits.min_replicas, min(limits.max_replicas, proposal))
        if self._steady_since is None:
            self._steady_since = now
        self._note(proposal, now)
        if proposal > current and ready >= current:
            if self._above_since is None:
                self._above_since = now
            if now - self._above_since >= limits.upscale_delay_seconds:
                return self._changed(proposal, now)
            return current
        self._above_since = None
        most = self._below[0][1]
        waited = now - self._steady_since >= limits.downscale_delay_seconds
        if most < current and waited:
            return self._changed(most, now)
        return max(limits.min_replicas, min(limits.max_replicas, current))

    def _note(self, proposal: int, now: float) -> None:
        """Keep what could be the most of the downscale delay, now or later."""
        while self._below and self._below[-1][1] <= proposal:
            self._below.pop()
        self._below.append((now, proposal))
        while now - self._below[0][0] > self._limits.downscale_delay_seconds:
            self._below.popleft()

    def _changed(self, replicas: int, now: float) -> int:
        self._above_since = None
        self._steady_since = now
        return replicas
