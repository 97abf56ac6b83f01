"""Causal attention whose bits depend on a row's own position and context alone.

A matrix product's rounding depends on its inner length and on its number of rows, so both are
pinned down (measured for MKL and oneDNN; the start-up self-check asks the machine at hand):

- a row at position p sees `round_up(p + 1, KEY_CHUNK)` keys, those after p masked: a sequence's
  rows are cut into pieces at multiples of KEY_CHUNK, whatever the step they come in;
- the query heads that share a key head are stacked as rows, and a piece's rows are padded to a
  multiple of 4, of 8 for heads wider than 64.

Pieces of several sequences that see equally many keys share one call.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cluster.models.kv_cache import KEY_CHUNK, KVCache, round_up
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

    `queries` picks from the flat `[num_tokens * heads, head_dim]`; `keys` are the slots, or where
    they lie: (first slot, distance between pieces). `masks` are by window, added to the scores.
    """

    num_pieces: int
    num_keys: int
    queries: Tensor
    keys: Tensor | tuple[int, int]
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All that depends on a step's rows and not on the layer."""

    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens]
    calls: tuple[_Call, ...]
    outputs: Tensor  # picks `[num_tokens * num_heads]` from the calls' stacked rows


def plan_attention(spec: ModelSpec, segments: Sequence[Segment], cache: KVCache) -> AttentionPlan:
    """Cut the segments into pieces and bundle these into calls.

    A row that is alone stands twice in the plan, as it does everywhere in the decoder.
    """
    device = cache.layers.device
    positions: list[int] = []
    slots: list[int] = []
    for segment in segments:
        stop = segment.start + segment.num_rows
        positions.extend(range(segment.start, stop))
        slots.extend(cache.slots(segment.block_table, segment.start, stop))
    calls: list[_Call] = []
    outputs = torch.empty(len(positions), spec.num_heads, dtype=torch.int64)
    num_stacked = 0
    for bundle in _bundles(segments):
        for pieces, keys in _located(bundle, cache):
            calls.append(_plan_call(spec, pieces, keys, cache, outputs, num_stacked))
            num_stacked += len(calls[-1].queries)
    if len(positions) == 1:
        positions, slots, outputs = positions * 2, slots * 2, outputs.expand(2, -1)
    return AttentionPlan(
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        tuple(calls),
        outputs.flatten().to(device),
    )


def attend(
    spec: ModelSpec, heads: Tensor, keys_values: Tensor, plan: AttentionPlan, window: int | None
) -> Tensor:
    """Attention of one layer.

    `heads` is `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, of which the first
    num_heads are the queries; `keys_values` is the layer of the cache, these rows' own keys
    already in it. Returns `[num_tokens, num_heads * head_dim]`.
    """
    flat = heads.view(-1, spec.head_dim)
    results = [_attend_call(spec, flat, keys_values, call, window) for call in plan.calls]
    stacked = results[0] if len(results) == 1 else torch.cat(results)
    return stacked.index_select(0, plan.outputs).view(heads.shape[0], -1)


def _attend_call(
    spec: ModelSpec, flat: Tensor, keys_values: Tensor, call: _Call, window: int | None
) -> Tensor:
    """One call's stacked rows, in the order (piece, row, key head)."""
    num_heads, size = spec.num_kv_heads, spec.head_dim
    shape = (call.num_pieces, num_heads, call.num_keys, size)
    if isinstance(call.keys, Tensor):
        keys_values = keys_values.index_select(0, call.keys)
        first, distance = 0, call.num_keys
    else:
        first, distance = call.keys
    slot = keys_values.stride(0)
    strides = (distance * slot, size, slot, 1)
    offset = keys_values.storage_offset() + first * slot
    keys = keys_values.as_strided(shape, strides, offset)
    values = keys_values.as_strided(shape, strides, offset + num_heads * size)
    queries = flat.index_select(0, call.queries)
    queries = queries.view(call.num_pieces, spec.num_kv_heads, -1, spec.head_dim)
    result = scaled_dot_product_attention(queries, keys, values, attn_mask=call.masks[window])
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


def _plan_call(
    spec: ModelSpec,
    pieces: list[_Piece],
    keys: Tensor | tuple[int, int],
    cache: KVCache,
    outputs: Tensor,
    num_stacked: int,
) -> _Call:
    """One call, `num_stacked` rows after the plan's first; notes its rows' places in `outputs`."""
    device, dtype = cache.layers.device, cache.layers.dtype
    group = spec.num_heads // spec.num_kv_heads
    num_keys = round_up(pieces[0].start + 1, KEY_CHUNK)
    num_rows = round_up(max(piece.num_rows for piece in pieces) * group, _row_multiple(spec))
    counts, first_rows, starts = torch.tensor(
        [(piece.num_rows, piece.first_row, piece.start) for piece in pieces]
    ).T[:, :, None]
    stacked = torch.arange(num_rows)
    offsets = torch.minimum(stacked // group, counts - 1)  # padding repeats the piece's last row
    tokens = first_rows + offsets
    key_heads = torch.arange(spec.num_kv_heads)
    heads = key_heads[:, None] * group + stacked % group
    queries = tokens[:, None, :] * (spec.num_heads + 2 * spec.num_kv_heads) + heads

    places = num_stacked + torch.arange(len(pieces) * num_rows * spec.num_kv_heads).view(
        len(pieces), num_rows, spec.num_kv_heads
    )
    real = stacked < counts * group
    rows_heads = (tokens[..., None] * spec.num_heads + heads.T)[real]
    outputs.view(-1)[rows_heads] = places[real]

    seen = torch.arange(num_keys) - (starts + offsets)[..., None]
    masks = {
        window: _mask(seen, window, dtype).unsqueeze(1).to(device)
        for window in set(spec.sliding_windows)
    }
    return _Call(len(pieces), num_keys, queries.flatten().to(device), keys, masks)


def _mask(distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 for keys at most 0 ahead and less than `window` behind, minus infinity for others."""
    hidden = distance > 0
    if window is not None:
        hidden |= distance <= -window
    return torch.zeros(distance.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _row_multiple(spec: ModelSpec) -> int:
    return 4 if spec.head_dim <= NARROW_HEAD else 8
