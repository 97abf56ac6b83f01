"""Who waits, and who of them goes first."""

from bisect import insort
from collections.abc import Iterator

from cluster.engine.sequence import Sequence
from cluster.engine.shares import Shares

AGING_STEPS = 256  # of waiting lift a sequence by one priority


def level(sequence: Sequence, step_id: int) -> int:
    """The sequence's priority, and one for each AGING_STEPS steps that it has waited."""
    waited = sequence.num_waited_steps
    if sequence.waits_since is not None:
        waited += step_id - sequence.waits_since
    return sequence.request.priority + waited // AGING_STEPS


def rank(sequence: Sequence, step_id: int) -> tuple[int, int]:
    """What sequences are ordered by, the first in line being the least: level, then age."""
    return -level(sequence, step_id), sequence.seq_id


class WaitingQueue:
    """Sequences by priority; within one, tenants by what they had; of a tenant's, the oldest.

    So a sequence that was put back goes before all later arrivals of its priority and tenant. The
    oldest of each priority rises while it waits, and its whole priority with it; hence no stream
    of higher ones passes a lower one for ever.
    """

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = Shares() if shares is None else shares
        self._by_priority: dict[int, dict[str, list[Sequence]]] = {}  # oldest first, none empty

    def __len__(self) -> int:
        return sum(len(line) for lines in self._by_priority.values() for line in lines.values())

    def __iter__(self) -> Iterator[Sequence]:
        for lines in self._by_priority.values():
            for line in lines.values():
                yield from line

    def push(self, sequence: Sequence, step_id: int) -> None:
        """Take in a sequence that waits from this step on."""
        sequence.waits_since = step_id
        request = sequence.request
        if not self._waits(request.tenant):
            self._shares.begin_waiting(request.tenant, weight=request.weight)
        lines = self._by_priority.setdefault(request.priority, {})
        line = lines.setdefault(request.tenant, [])
        insort(line, sequence, key=lambda other: other.seq_id)

    def first(self, step_id: int) -> Sequence | None:
        """Who goes next, or None when nobody waits."""
        first: Sequence | None = None
        best = (0, 0)
        for lines in self._by_priority.values():
            fronts = [line[0] for line in lines.values()]
            # The longest waiting one lifts them all, or else its tenant would go first for it.
            standing = min(rank(sequence, step_id) for sequence in fronts)
            if first is None or standing < best:
                first, best = min(fronts, key=self._turn), standing
        return first

    def remove(self, sequence: Sequence, step_id: int) -> None:
        """Let a sequence out; it keeps what it has waited."""
        assert sequence.waits_since is not None
        sequence.num_waited_steps += step_id - sequence.waits_since
        sequence.waits_since = None
        request = sequence.request
        lines = self._by_priority[request.priority]
        lines[request.tenant].remove(sequence)
        if not lines[request.tenant]:
            del lines[request.tenant]
        if not lines:
            del self._by_priority[request.priority]

    def _waits(self, tenant: str) -> bool:
        return any(tenant in lines for lines in self._by_priority.values())

    def _turn(self, sequence: Sequence) -> tuple[float, int]:
        """What tenants of one priority are ordered by: what they had, then age."""
        return self._shares.service(sequence.request.tenant), sequence.seq_id
