"""Which draft worker follows which sequence.

    new sequence ──> the open worker with the fewest ──> stays while that worker is in use
                                                             │ it left, died, or is given up
                                                             └──> as if it were new

A worker that comes gets its share by being the one with the fewest; nothing is moved to it, for a
moved context is computed again.
"""

from collections import Counter
from collections.abc import Collection, Mapping


class Assignment:
    """Each sequence at one worker of those in use, or at none yet.

    Workers serve other engines too: `others` says for how many sequences, as far as known.
    """

    def __init__(self) -> None:
        self._others: dict[str, int] = {}
        self._worker_of: dict[int, str] = {}
        self._own: Counter[str] = Counter()

    def worker_of(self, seq_id: int) -> str | None:
        """Where a sequence is."""
        return self._worker_of.get(seq_id)

    def set_workers(self, num_sequences: Mapping[str, int]) -> None:
        """Use these workers, which said that they hold so many sequences, this engine's included.

        Those in use before that are not among them have to `leave` first.
        """
        self._others = {
            worker_id: max(told - self._own[worker_id], 0)
            for worker_id, told in num_sequences.items()
        }

    def leave(self, worker_id: str) -> list[int]:
        """A worker is not used any more; returns the sequences that were there."""
        self._others.pop(worker_id, None)
        left = [seq_id for seq_id, where in self._worker_of.items() if where == worker_id]
        for seq_id in left:
            del self._worker_of[seq_id]
        del self._own[worker_id]
        return left

    def place(self, seq_id: int, open_to: Collection[str]) -> str:
        """Where a sequence is; a new one goes to the worker of these that has least to do."""
        known = self._worker_of.get(seq_id)
        if known is not None:
            return known
        chosen = min(open_to, key=self._load)
        self._worker_of[seq_id] = chosen
        self._own[chosen] += 1
        return chosen

    def release(self, seq_id: int) -> str | None:
        """A sequence ended, or is to be placed anew; returns where it was."""
        worker_id = self._worker_of.pop(seq_id, None)
        if worker_id is not None:
            self._own[worker_id] -= 1
        return worker_id

    def _load(self, worker_id: str) -> tuple[int, int]:
        own = self._own[worker_id]
        return self._others.get(worker_id, 0) + own, own
