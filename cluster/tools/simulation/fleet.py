"""The replicas of one kind in a simulated cluster: they take time to start, and to be counted."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

R = TypeVar("R")


class Fleet(Generic[R]):
    """`wanted` replicas, of which some still start. Those that are let go are the caller's."""

    def __init__(self, make: Callable[[str, float], R], *, name: str, start_seconds: float) -> None:
        """`make` is given an id and the time."""
        self._make = make
        self._name = name
        self._start_seconds = start_seconds
        self._made = 0
        self._starting: list[float] = []  # when each is there, soonest first
        self.there: dict[str, R] = {}

    @property
    def wanted(self) -> int:
        """There or on the way."""
        return len(self.there) + len(self._starting)

    def begin(self, number: int, *, now: float) -> None:
        """As many are there at once."""
        self._starting = [now] * number
        self.arrive(now=now)

    def grow(self, number: int, *, now: float) -> None:
        """Start as many more."""
        self._starting += [now + self._start_seconds] * number

    def shrink(self, number: int, *, order: Callable[[R], float]) -> list[R]:
        """Let go of as many: those that start, latest first, then those of lowest `order`."""
        cancelled = min(number, len(self._starting))
        if cancelled:
            del self._starting[-cancelled:]
        leaving = sorted(self.there, key=lambda each: order(self.there[each]))
        return [self.there.pop(each) for each in leaving[: number - cancelled]]

    def arrive(self, *, now: float) -> list[R]:
        """Those that have started by now."""
        return list(self._arriving(now))

    def _arriving(self, now: float) -> Iterator[R]:
        while self._starting and self._starting[0] <= now:
            self._starting.pop(0)
            self._made += 1
            replica_id = f"{self._name}-{self._made}"
            self.there[replica_id] = replica = self._make(replica_id, now)
            yield replica
