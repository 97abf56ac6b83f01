"""A static table of n-grams and what followed them, counted over a corpus of token ids.

For each context length the contexts are packed into integers, TOKEN_BITS a token, and sorted:

    keys       [1-2, 1-3, 7-2 ...]    int64
    token_ids  [  3,   9,   4 ...]    int32   the token that followed most often (the smaller id
    counts     [  8,   1,   2 ...]    int32    of two), how often it did,
    totals     [ 10,   1,   2 ...]    int32    and how often the context was followed by any
"""

import zipfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigurationError

CONTEXT_LENGTHS = (3, 2, 1)  # of four tokens brought nothing more where it was measured
TOKEN_BITS = 21
FIELDS = ("keys", "token_ids", "counts", "totals")

Integers = NDArray[np.int64]


class Entry(NamedTuple):
    """What mostly followed a context of `length` tokens: so many `times` of `total`."""

    length: int
    token_id: int
    times: int
    total: int


class NgramTable:
    """Looks contexts up, in microseconds each; an n-gram takes about 100 bytes.

    `vocabulary` says whose token ids they are.
    """

    def __init__(self, columns: dict[int, dict[str, "array[int]"]], *, vocabulary: str) -> None:
        self._columns = columns
        self._searched = [
            (
                length,
                (1 << length * TOKEN_BITS) - 1,
                dict(zip(its["keys"], range(len(its["keys"])), strict=True)),
                its["token_ids"],
                its["counts"],
                its["totals"],
            )
            for length, its in columns.items()
        ]
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return sum(len(columns["keys"]) for columns in self._columns.values())

    def entries(self, token_ids: Sequence[int]) -> list[Entry]:
        """What the table has on the last tokens, the longest context first."""
        key = 0
        for token_id in token_ids[-max(CONTEXT_LENGTHS) :]:
            key = key << TOKEN_BITS | token_id
        found = []
        for length, mask, rows, followers, counts, totals in self._searched:
            row = rows.get(key & mask)
            if row is not None and length <= len(token_ids):
                found.append(Entry(length, followers[row], counts[row], totals[row]))
        return found

    def save(self, path: Path) -> None:
        """Write it to one file, under exactly that name."""
        columns = {
            f"{name}_{length}": np.asarray(column)
            for length, its in self._columns.items()
            for name, column in its.items()
        }
        columns["vocabulary"] = np.array(self.vocabulary)
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **columns)


def build_table(
    texts: Iterable[Sequence[int]], *, vocabulary: str, min_count: int = 1
) -> NgramTable:
    """Count what followed each context in the texts; none goes across two of them.

    Continuations that were seen less than `min_count` times are left out.
    """
    arrays = [np.asarray(text, dtype=np.int64) for text in texts]
    columns = {length: _counted(arrays, length, min_count) for length in CONTEXT_LENGTHS}
    return NgramTable(columns, vocabulary=vocabulary)


def load_table(path: Path) -> NgramTable:
    """Read what `save` wrote. Raises ConfigurationError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {
                length: {
                    name: _column(name, file[f"{name}_{length}"].astype(np.int64))
                    for name in FIELDS
                }
                for length in CONTEXT_LENGTHS
            }
            for its in columns.values():
                _check(its)
            return NgramTable(columns, vocabulary=str(file["vocabulary"]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{path} is no n-gram table: {error}") from error


def _check(columns: dict[str, "array[int]"]) -> None:
    """Raises ValueError unless there is an entry for every key, and the keys are in order."""
    keys = np.asarray(columns["keys"])
    if len({len(column) for column in columns.values()}) > 1 or np.any(keys[1:] <= keys[:-1]):
        raise ValueError("its columns do not belong together")


def _counted(texts: Sequence[Integers], length: int, min_count: int) -> dict[str, "array[int]"]:
    """The columns of one context length."""
    keys, token_ids = _pairs(texts, length)
    order = np.lexsort((token_ids, keys))
    keys, token_ids = keys[order], token_ids[order]
    firsts = _starts(keys, token_ids)
    counts = np.diff(np.append(firsts, len(keys)))
    keys, token_ids = keys[firsts], token_ids[firsts]
    totals = np.add.reduceat(counts, _starts(keys)) if len(keys) else counts
    best = np.lexsort((token_ids, -counts, keys))  # of each key the most frequent comes first
    best = best[_starts(keys[best])]
    kept = counts[best] >= min_count
    best, totals = best[kept], totals[kept]
    values = dict(zip(FIELDS, (keys[best], token_ids[best], counts[best], totals), strict=True))
    return {name: _column(name, column) for name, column in values.items()}


def _pairs(texts: Sequence[Integers], length: int) -> tuple[Integers, Integers]:
    """Every packed context and the token after it."""
    parts = [text for text in texts if len(text) > length]
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    windows = np.concatenate(
        [np.lib.stride_tricks.sliding_window_view(text, length + 1) for text in parts]
    )
    keys = np.zeros(len(windows), np.int64)
    for place in range(length):
        keys = keys << TOKEN_BITS | windows[:, place]
    return keys, windows[:, length]


def _starts(*columns: Integers) -> Integers:
    """Where in sorted columns each run of equal rows begins."""
    changes = np.zeros(len(columns[0]), dtype=bool)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _column(name: str, values: Integers) -> "array[int]":
    """As it is searched: an array whose items are plain ints."""
    kind = "q" if name == "keys" else "i"
    return array(kind, values.astype(np.int64 if name == "keys" else np.int32).tobytes())
