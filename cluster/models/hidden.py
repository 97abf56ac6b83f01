"""Hidden states of a target's rows, for drafters that live beside it.

A step computes rows of which some are drafts that are then rejected. Only rows whose tokens stand
are kept, under their absolute positions, and with the tokens they were computed of:

    positions     0 . . . 40 41 42 43 44        step: the last token 41, drafts 42 43 44
    kept before   ---------->|                  accepted: 42
    kept after    --------------->|             the state of the next token, 43, is the next step's
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Taps:
    """What some layers of a decoder are given in one pass, `[num_tokens, hidden]` each.

    A layer after the last one would be given what goes into the final norm.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(sorted(set(layers)))
        self._rows: dict[int, Tensor] = {}

    def offer(self, layer: int, hidden: Tensor) -> None:
        """Take a layer's input, if it is asked for."""
        if layer in self.layers:
            self._rows[layer] = hidden

    def of(self, layers: Sequence[int]) -> list[Tensor]:
        """What these layers were given."""
        return [self._rows[layer] for layer in layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenWanted:
    """What a drafter asks a target to keep, for up to `num_sequences` at a time.

    Of every sequence the last `num_rows` positions; of each position the inputs of `layers`, one
    after another, or without any the state after the final norm, which the head is given.
    """

    num_sequences: int
    num_rows: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SettledRows:
    """One sequence's part of a step whose tokens stand.

    Positions `start` on are of `token_ids`; the first is row `first_row` of the flat batch.
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    first_row: int


@dataclass(slots=True)
class _Kept:
    """Positions first..first + len(token_ids) - 1 of a sequence, in the ring `slot`."""

    slot: int
    first: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + len(self.token_ids)


class HiddenRows:
    """The last settled rows of each sequence, `[width]` each. Used by the target's thread alone.

    The memory is all taken at the beginning. When there are more sequences than it is for, the one
    that was computed longest ago is forgotten.
    """

    def __init__(
        self, wanted: HiddenWanted, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.wanted = wanted
        self._width = hidden_size * max(len(wanted.layers), 1)
        self._rows = torch.zeros(
            (wanted.num_sequences * wanted.num_rows, self._width), dtype=dtype, device=device
        )
        self._free_slots = list(range(wanted.num_sequences))
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def keep(self, settled: Sequence[SettledRows], hidden: Tensor, taps: Taps | None) -> None:
        """Take a step's settled rows in, out of all its rows: `hidden` after the final norm."""
        sources: list[int] = []
        places: list[int] = []
        for part in settled:
            num_rows = len(part.token_ids)
            if not num_rows:
                continue
            kept = self._extended(part)
            fresh = range(max(num_rows - self.wanted.num_rows, 0), num_rows)
            sources += [part.first_row + row for row in fresh]
            places += self._places(kept, part.start + fresh.start, part.start + num_rows)
        if not sources:
            return
        device = self._rows.device
        rows = torch.tensor(sources, device=device)
        layers = [hidden] if taps is None or not self.wanted.layers else taps.of(self.wanted.layers)
        values = torch.cat([each.index_select(0, rows) for each in layers], dim=-1)
        self._rows.index_copy_(0, torch.tensor(places, device=device), values)

    def first(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        """The first position from which on there are rows of all tokens but the last.

        None when there are none, or what is kept under this id is not of these tokens.
        """
        kept = self._kept.get(seq_id)
        stop = len(token_ids) - 1
        if kept is None or not kept.first < stop <= kept.stop:
            return None
        if kept.token_ids[: stop - kept.first] != list(token_ids[kept.first : stop]):
            return None
        return kept.first

    def rows(self, seq_id: int, start: int, stop: int) -> Tensor:
        """The rows of these positions, from `first` on: `[stop - start, width]`."""
        places = self._places(self._kept[seq_id], start, stop)
        return self._rows.index_select(0, torch.tensor(places, device=self._rows.device))

    def take(self, token_ids: Sequence[int]) -> Tensor | None:
        """The rows of a sequence of just these tokens, the last of which may not be computed yet.

        It is forgotten. None where the rows of its beginning are not there.
        """
        wanted = list(token_ids)
        for seq_id, kept in self._kept.items():
            whole = kept.first == 0 and len(wanted) - 1 <= kept.stop <= len(wanted)
            if whole and kept.token_ids == wanted[: kept.stop]:
                rows = self.rows(seq_id, 0, kept.stop)
                self.forget(seq_id)
                return rows
        return None

    def forget(self, seq_id: int) -> None:
        """Keep nothing of a sequence any more."""
        kept = self._kept.pop(seq_id, None)
        if kept is not None:
            self._free_slots.append(kept.slot)

    def _extended(self, part: SettledRows) -> _Kept:
        """The sequence's entry with a part's positions, and none after them."""
        kept = self._kept.get(part.seq_id)
        if kept is None:
            if not self._free_slots:
                self.forget(next(iter(self._kept)))
            kept = self._kept[part.seq_id] = _Kept(self._free_slots.pop(), part.start)
        self._kept.move_to_end(part.seq_id)
        if kept.first <= part.start <= kept.stop:
            del kept.token_ids[part.start - kept.first :]
        else:
            kept.first, kept.token_ids = part.start, []
        kept.token_ids += part.token_ids
        excess = len(kept.token_ids) - self.wanted.num_rows
        if excess > 0:
            del kept.token_ids[:excess]
            kept.first += excess
        return kept

    def _places(self, kept: _Kept, start: int, stop: int) -> list[int]:
        size = self.wanted.num_rows
        return [kept.slot * size + position % size for position in range(start, stop)]
