"""Workers given to engines so that together they bring the most, and few change hands.

With a worker for each engine, or more, nobody shares: each next worker goes to whom it brings the
most. With fewer, each engine is leased one, and they are shared as evenly as the demand allows.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLEARLY = 1.25  # times what a worker brings where it is, before it moves; and of an even share
MOST_MOVED = 8  # one in so many workers moves in a round, and at least one

Leases = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Claim:
    """What an engine would make of workers.

    `demand` are its sequences, `worth` the tokens a second that drafts bring one of them, and
    `sequences` how many of them a worker can serve.
    """

    demand: float
    worth: float
    sequences: float

    def marginal(self, num_workers: int) -> float:
        """Tokens a second that a worker more brings to so many; the less the more there are."""
        if self.demand <= 0:
            return 0.0
        ratio = self.sequences / self.demand
        served = math.exp(-num_workers * ratio) * -math.expm1(-ratio)
        return self.worth * self.demand * served


def lease(
    claims: Mapping[str, Claim], workers: Sequence[str], before: Mapping[str, Sequence[str]]
) -> tuple[Leases, int]:
    """Who has which of the workers from now on, and how many went from one engine to another.

    Every engine that claims has at least one if there is any. `before` are the leases that were.
    """
    if not workers or not claims:
        return {}, 0
    if len(workers) < len(claims):
        return _shared(claims, workers, before), 0
    holdings = _Holdings(claims)
    free = set(workers)
    for name in sorted(claims):
        for worker in before.get(name, ()):
            if worker in free:  # one that was shared stays with the first
                free.discard(worker)
                holdings.give(name, worker)
    for worker in sorted(free):
        holdings.give(holdings.neediest(), worker)
    num_moved = 0
    while holdings.may_move() and (
        num_moved < max(len(workers) // MOST_MOVED, 1) or holdings.somebody_has_none()
    ):
        holdings.move()
        num_moved += 1
    return holdings.leases(), num_moved


class _Holdings:
    """Who holds what, and in two heaps, who gains most by a worker and who loses least by one.

    Entries of the heaps are left behind when a count changes: those that do not fit are skipped.
    """

    def __init__(self, claims: Mapping[str, Claim]) -> None:
        self._claims = claims
        self._held: dict[str, list[str]] = {name: [] for name in sorted(claims)}
        self._gains: list[tuple[float, str, int]] = []
        self._losses: list[tuple[float, str, int]] = []
        for name in self._held:
            self._note(name)

    def give(self, name: str, worker: str) -> None:
        """One worker more."""
        self._held[name].append(worker)
        self._note(name)

    def neediest(self) -> str:
        """To whom a worker brings most; before all others, those that have none."""
        return self._top(self._gains)[1]

    def somebody_has_none(self) -> bool:
        """Whether an engine that claims has no worker."""
        return not self._held[self.neediest()]

    def may_move(self) -> bool:
        """Whether a worker is worth clearly more elsewhere."""
        if len(self._losses) == 0:
            return False
        loss, loser, _ = self._top(self._losses)
        gain, winner, _ = self._top(self._gains)
        return loser != winner and -gain > CLEARLY * loss

    def move(self) -> None:
        """Take one from who loses least and give it to who gains most."""
        winner, loser = self._top(self._gains)[1], self._top(self._losses)[1]
        worker = self._held[loser].pop()
        self._note(loser)
        self.give(winner, worker)

    def leases(self) -> Leases:
        """What came of it."""
        return {name: tuple(held) for name, held in self._held.items()}

    def _note(self, name: str) -> None:
        claim, count = self._claims[name], len(self._held[name])
        heapq.heappush(self._gains, (-claim.marginal(count) if count else -math.inf, name, count))
        if count:
            loss = claim.marginal(count - 1) if count > 1 else math.inf
            heapq.heappush(self._losses, (loss, name, count))

    def _top(self, heap: list[tuple[float, str, int]]) -> tuple[float, str, int]:
        while len(self._held[heap[0][1]]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0]


def _shared(
    claims: Mapping[str, Claim], workers: Sequence[str], before: Mapping[str, Sequence[str]]
) -> Leases:
    """One worker for each engine: the one it had unless that has clearly more than its share."""
    most = CLEARLY * math.fsum(claim.demand for claim in claims.values()) / len(workers)
    load = dict.fromkeys(workers, 0.0)
    leases: Leases = {}
    left = []
    for name in sorted(claims, key=lambda name: (-claims[name].demand, name)):
        demand = claims[name].demand
        own = next((worker for worker in before.get(name, ()) if worker in load), None)
        if own is not None and (load[own] == 0 or load[own] + demand <= most):
            load[own] += demand
            leases[name] = (own,)
        else:
            left.append(name)
    heap = [(sum_of, worker) for worker, sum_of in load.items()]
    heapq.heapify(heap)
    for name in left:
        sum_of, worker = heap[0]
        heapq.heapreplace(heap, (sum_of + claims[name].demand, worker))
        leases[name] = (worker,)
    return leases
