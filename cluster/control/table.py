"""Numbers by sequence, in columns."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_CAPACITY = 16


class SequenceTable:
    """One row a sequence, one array a column, so that a step's sequences are read at once.

    A new sequence's row is a copy of `initial`, whose entries may be replaced (never reshaped).
    """

    def __init__(self, **initial: NDArray[Any]) -> None:
        self.initial = initial
        self._rows: dict[int, int] = {}
        self._free: list[int] = list(range(FIRST_CAPACITY))
        self._last: tuple[list[int], NDArray[np.int64]] = ([], np.zeros(0, dtype=np.int64))
        self._columns = {
            name: np.repeat(value[None], FIRST_CAPACITY, axis=0) for name, value in initial.items()
        }

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A whole column, to be read and written at `rows`."""
        return self._columns[name]

    def rows(self, seq_ids: Sequence[int]) -> NDArray[np.int64]:
        """Where these sequences are, not to be written to; whoever is new gets a row."""
        ids, rows = self._last
        if ids != seq_ids:  # mostly they are those of the last step
            for seq_id in seq_ids:
                if seq_id not in self._rows:
                    self._add(seq_id)
            rows = np.array([self._rows[seq_id] for seq_id in seq_ids], dtype=np.int64)
            self._last = list(seq_ids), rows
        return rows

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Free their rows; ids without one are ignored."""
        self._last = ([], np.zeros(0, dtype=np.int64))
        for seq_id in seq_ids:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                self._free.append(row)

    def _add(self, seq_id: int) -> None:
        if not self._free:
            size = len(self._rows)
            self._free.extend(range(size, 2 * size))
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, column])
        row = self._rows[seq_id] = self._free.pop()
        for name, value in self.initial.items():
            self._columns[name][row] = value
