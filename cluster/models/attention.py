"""Causal attention whose bits depend on a row's own position and context alone.

Compiled kernels look at one row at a time. Elsewhere a matrix product's rounding depends on its
inner length and on its number of rows, so both are pinned down (measured for MKL and oneDNN; the
start-up self-check asks the machine at hand):

- a row at position p sees `round_up(p + 1, KEY_CHUNK)` keys, those after p masked: a sequence's
  rows are cut into pieces at multiples of KEY_CHUNK, whatever the step they come in;
- the query heads that share a key head are stacked as rows, and a piece's rows are padded to a
  multiple of 4, of 8 for heads wider than 64.

Pieces of several sequences that see equally many keys share one call.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cluster.models.compiled import CompiledPlan, serves
from cluster.models.kv_cache import KEY_CHUNK, KVCache, round_up
from cluster.models.rotary import rotate
from cluster.models.spec import ModelSpec

NARROW_HEAD = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in the flat batch: positions start..start+num_rows-1."""

    block_table: tuple[int, ...]
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one sequence that see the same number of keys."""

    segment: Segment
    first_row: int  # in the flat batch
    start: int  # position of that row
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Call:
    """Pieces attended to together, `rows` stacked query rows each.

    `queries` picks from the flat `[num_tokens * heads, head_dim]`. `keys` has for each layer the
    keys and the values, `[pieces, key heads, num_keys, head_dim]` each, in place; or it is the
    slots to gather them from. `masks` are by window, added to the scores.
    """

    num_pieces: int
    num_keys: int
    queries: Tensor
    keys: tuple[tuple[Tensor, Tensor], ...] | Tensor
    masks: dict[int | None, Tensor]


class AttentionPlan(Protocol):
    """All that depends on a step's rows and not on what a layer computes from them."""

    @property
    def positions(self) -> Tensor:
        """Of the rows, `[num_tokens]`."""
        ...

    def attend(self, heads: Tensor, factors: Tensor, layer: int) -> Tensor:
        """Attention of one layer, which first enters the rows' keys and values into the cache.

        `heads` is `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values,
        which are rotated by `factors` and may be overwritten. Returns `[num_tokens,
        num_heads * head_dim]`.
        """
        ...


@dataclass(frozen=True, slots=True)
class PiecewisePlan:
    """Pieces by calls of torch's own attention."""

    spec: ModelSpec
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens]
    layers: tuple[Tensor, ...]  # of the cache
    windows: tuple[int | None, ...]  # by layer
    calls: tuple[_Call, ...]
    outputs: Tensor  # picks `[num_tokens * num_heads]` from the calls' stacked rows

    def attend(self, heads: Tensor, factors: Tensor, layer: int) -> Tensor:
        """As AttentionPlan says."""
        spec = self.spec
        heads = rotate(heads, factors)
        self.layers[layer].index_copy_(0, self.slots, heads[:, spec.num_heads :])
        flat = heads.view(-1, spec.head_dim)
        results = [_attend_call(spec, flat, self, call, layer) for call in self.calls]
        stacked = results[0] if len(results) == 1 else torch.cat(results)
        return stacked.index_select(0, self.outputs).view(heads.shape[0], -1)


def plan_attention(
    spec: ModelSpec, segments: Sequence[Segment], cache: KVCache, *, paired: bool = True
) -> AttentionPlan:
    """Where all rows of the segments stand, and how they are best attended to there.

    Where rows are `paired`, one that is alone stands twice in the plan.
    """
    device = cache.layers.device
    positions: list[int] = []
    slots: list[int] = []
    for segment in segments:
        stop = segment.start + segment.num_rows
        positions.extend(range(segment.start, stop))
        slots.extend(cache.slots(segment.block_table, segment.start, stop))
    if serves(device, cache.layers.dtype):
        twice = 2 if paired and len(positions) == 1 else 1
        return _plan_compiled(
            spec, segments, cache, positions=positions * twice, slots=slots * twice
        )
    return _plan_pieces(spec, segments, cache, positions=positions, slots=slots)


def _plan_compiled(
    spec: ModelSpec,
    segments: Sequence[Segment],
    cache: KVCache,
    *,
    positions: list[int],
    slots: list[int],
) -> CompiledPlan:
    """A row at a time, which finds its keys by its sequence's block table."""
    owners = [index for index, segment in enumerate(segments) for _ in range(segment.num_rows)]
    owners += owners[: len(positions) - len(owners)]
    return CompiledPlan(
        spec,
        cache,
        positions=positions,
        slots=slots,
        tables=[segment.block_table for segment in segments],
        owners=owners,
    )


def _plan_pieces(
    spec: ModelSpec,
    segments: Sequence[Segment],
    cache: KVCache,
    *,
    positions: list[int],
    slots: list[int],
) -> PiecewisePlan:
    """Cut the segments into pieces and bundle these into calls."""
    device = cache.layers.device
    located = [part for bundle in _bundles(segments) for part in _located(bundle, cache)]
    stacking = _stacking(
        _Heads.of(spec),
        tuple(
            tuple((piece.first_row, piece.num_rows) for piece in pieces) for pieces, _ in located
        ),
        device,
    )
    calls = tuple(
        _plan_call(spec, pieces, keys, cache, queries=queries, offsets=offsets)
        for (pieces, keys), queries, offsets in zip(
            located, stacking.queries, stacking.offsets, strict=True
        )
    )
    if len(positions) == 1:
        positions, slots = positions * 2, slots * 2
    return PiecewisePlan(
        spec,
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        cache.layers.unbind(),
        spec.sliding_windows,
        calls,
        stacking.outputs,
    )


def _attend_call(
    spec: ModelSpec, flat: Tensor, plan: PiecewisePlan, call: _Call, layer: int
) -> Tensor:
    """One call's stacked rows, in the order (piece, row, key head)."""
    if isinstance(call.keys, Tensor):
        gathered = plan.layers[layer].index_select(0, call.keys)
        gathered = gathered.view(call.num_pieces, call.num_keys, -1, spec.head_dim).transpose(1, 2)
        keys, values = gathered.chunk(2, dim=1)
    else:
        keys, values = call.keys[layer]
    queries = flat.index_select(0, call.queries)
    queries = queries.view(call.num_pieces, spec.num_kv_heads, -1, spec.head_dim)
    mask = call.masks[plan.windows[layer]]
    result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return result.transpose(1, 2).reshape(-1, spec.head_dim)


def _bundles(segments: Sequence[Segment]) -> list[list[_Piece]]:
    """Pieces by number of keys and, within a factor of two, by number of rows."""
    bundles: dict[tuple[int, int], list[_Piece]] = defaultdict(list)
    first_row = 0
    for segment in segments:
        start, stop = segment.start, segment.start + segment.num_rows
        while start < stop:
            num_keys = round_up(start + 1, KEY_CHUNK)
            piece = _Piece(segment, first_row, start, min(num_keys, stop) - start)
            bundles[num_keys, piece.num_rows.bit_length()].append(piece)
            first_row += piece.num_rows
            start += piece.num_rows
    return list(bundles.values())


def _located(
    bundle: list[_Piece], cache: KVCache
) -> Iterator[tuple[list[_Piece], Tensor | tuple[int, int]]]:
    """The bundle in parts, each with where its keys lie.

    Sequences whose keys lie in one block are read in place, evenly spaced ones together; all
    others are gathered slot by slot. What is masked anyway points to the sequence's first slot:
    no row touches another's memory.
    """
    num_keys = round_up(bundle[0].start + 1, KEY_CHUNK)
    scattered, runs = [], list[list[tuple[int, _Piece]]]()
    for piece in sorted(bundle, key=lambda piece: piece.segment.block_table[0]):
        first = cache.contiguous_from(piece.segment.block_table, num_keys)
        if first is None:
            scattered.append(piece)
        elif runs and (len(runs[-1]) == 1 or first - runs[-1][-1][0] == _distance(runs[-1])):
            runs[-1].append((first, piece))
        else:
            runs.append([(first, piece)])
    for run in runs:
        yield [piece for _, piece in run], (run[0][0], _distance(run))
    if scattered:
        slots: list[int] = []
        for piece in scattered:
            stop = piece.start + piece.num_rows
            own = cache.slots(piece.segment.block_table, 0, stop)
            slots.extend(own + own[:1] * (num_keys - stop))
        yield scattered, torch.tensor(slots, device=cache.layers.device)


def _distance(run: list[tuple[int, _Piece]]) -> int:
    return run[1][0] - run[0][0] if len(run) > 1 else 0


@dataclass(frozen=True, slots=True)
class _Heads:
    """What of a model decides how query heads are stacked."""

    num_heads: int
    num_kv_heads: int
    row_multiple: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        multiple = 4 if spec.head_dim <= NARROW_HEAD else 8
        return cls(spec.num_heads, spec.num_kv_heads, multiple)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class _Stacking:
    """Where stacked rows come from and go, by call: the same from step to step while decoding.

    `offsets` is `[pieces, rows]`: the row of the piece that a stacked row is of.
    """

    queries: tuple[Tensor, ...]
    offsets: tuple[Tensor, ...]
    outputs: Tensor


@lru_cache(maxsize=64)
def _stacking(
    heads: _Heads, calls: tuple[tuple[tuple[int, int], ...], ...], device: torch.device
) -> _Stacking:
    """`calls` has for each call its pieces' (first row in the flat batch, number of rows)."""
    group, key_heads = heads.group, torch.arange(heads.num_kv_heads)
    num_tokens = sum(num_rows for pieces in calls for _, num_rows in pieces)
    outputs = torch.empty(num_tokens, heads.num_heads, dtype=torch.int64)
    queries, offsets = [], []
    num_stacked = 0
    for pieces in calls:
        first_rows, counts = torch.tensor(pieces).T[:, :, None]
        stacked = torch.arange(round_up(int(counts.max()) * group, heads.row_multiple))
        offsets.append(torch.minimum(stacked // group, counts - 1))  # padding repeats the last row
        tokens = first_rows + offsets[-1]
        own_heads = key_heads[:, None] * group + stacked % group
        flat = tokens[:, None, :] * (heads.num_heads + 2 * heads.num_kv_heads) + own_heads
        queries.append(flat.flatten().to(device))

        shape = (len(pieces), len(stacked), heads.num_kv_heads)
        places = num_stacked + torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
        real = stacked < counts * group
        outputs.view(-1)[(tokens[..., None] * heads.num_heads + own_heads.T)[real]] = places[real]
        num_stacked += places.numel()
    if num_tokens == 1:
        outputs = outputs.expand(2, -1)
    return _Stacking(tuple(queries), tuple(offsets), outputs.flatten().to(device))


def _plan_call(
    spec: ModelSpec,
    pieces: list[_Piece],
    keys: Tensor | tuple[int, int],
    cache: KVCache,
    *,
    queries: Tensor,
    offsets: Tensor,
) -> _Call:
    num_keys = round_up(pieces[0].start + 1, KEY_CHUNK)
    starts = torch.tensor([[piece.start] for piece in pieces])
    ahead = torch.arange(num_keys) - (starts + offsets)[..., None]
    masks = {
        window: _mask(ahead, window, cache.layers.dtype).unsqueeze(1).to(cache.layers.device)
        for window in set(spec.sliding_windows)
    }
    where = (
        keys
        if isinstance(keys, Tensor)
        else _in_place(cache, *keys, num_pieces=len(pieces), num_keys=num_keys)
    )
    return _Call(len(pieces), num_keys, queries, where, masks)


def _in_place(
    cache: KVCache, first: int, distance: int, *, num_pieces: int, num_keys: int
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Keys and values of every layer where they lie: from slot `first` on, `distance` apart."""
    num_layers, _, num_heads, size = cache.layers.shape
    layer, slot = cache.layers.stride(0), cache.layers.stride(1)
    shape = (num_layers, num_pieces, num_heads, num_keys, size)
    strides = (layer, distance * slot, size, slot, 1)
    both = cache.layers.as_strided(shape, strides, first * slot)
    keys, values = both.chunk(2, dim=2)
    return tuple(zip(keys.unbind(), values.unbind(), strict=True))


def _mask(ahead: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 for keys at most 0 ahead and less than `window` behind, minus infinity for others."""
    hidden = ahead > 0
    if window is not None:
        hidden |= ahead <= -window
    return torch.zeros(ahead.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
