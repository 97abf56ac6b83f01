"""Attention, compiled: each row by itself over the keys up to its own, in blocks of any size."""

import numpy as np
from numba import carray, int64, prange, void

from cluster.jit import inner, kernel
from cluster.models.emit import LANES, MOST_HEADS, MOST_VECTORS
from cluster.models.tiles import (
    KEYS_AHEAD,
    dot,
    dots,
    exponentials,
    floats,
    integers,
    weigh,
)

KEYS_AT_HAND = 64  # that all rows look at while the nearest cache has them
ROWS_AT_ONCE = 16
PLACES_AHEAD = KEYS_AHEAD + LANES
ONE, ZERO = np.float32(1), np.float32(0)


@kernel(void(*[int64] * 8))
def enter(heads, factors, num_rows, num_heads, num_kv, size, layer, slots):
    """Rotate queries and keys where they lie, and copy every row's keys and values to its slot.

    `factors` are complex, for every head of every row.
    """
    where = carray(integers(slots), num_rows)
    width = (num_heads + 2 * num_kv) * size
    num_rotated, num_kept = (num_heads + num_kv) * size, 2 * num_kv * size
    for row in range(num_rows):
        numbers = carray(floats(heads + row * width * 4), width)
        turns = carray(floats(factors + row * width * 4), width)
        for at in range(0, num_rotated, 2):
            real, imaginary = numbers[at], numbers[at + 1]
            numbers[at] = real * turns[at] - imaginary * turns[at + 1]
            numbers[at + 1] = real * turns[at + 1] + imaginary * turns[at]
        slot = carray(floats(layer + where[row] * num_kept * 4), num_kept)
        for at in range(num_kept):
            slot[at] = numbers[num_heads * size + at]


@inner
def _attend(heads, num_heads, num_kv, size, layer, positions, first_row, num_rows, head, blocks,
            block, stride, window, out):  # fmt: skip
    """The query heads that share a key head, of consecutive rows of one sequence.

    Keys and values are passed over some at a time, for all rows while they are at hand. Blocks of
    `block` positions are `stride` slots apart.
    """
    group, slot_size = num_heads // num_kv, 2 * num_kv * size
    end = positions[first_row + num_rows - 1] + 1
    begin = max(0, positions[first_row] + 1 - window) if window else 0
    num = end - begin
    weights = np.empty((num_rows, group, num + LANES), dtype=np.float32)
    places = np.empty(num + PLACES_AHEAD, dtype=np.int64)
    for index in range(num):
        position = begin + index
        slot = blocks[position // block] * stride + position % block
        places[index] = layer + (slot * slot_size + head * size) * 4
    places[num:] = places[num - 1]
    for first in range(0, num, KEYS_AT_HAND):
        for row in range(num_rows):
            low, high = _seen(positions[first_row + row], window, begin, first, num)
            if low < high:
                flat = (first_row + row) * (num_heads + 2 * num_kv) + head * group
                _products(heads + flat * size * 4, group, size, places, low, high, weights[row])
    scale = ONE / np.sqrt(np.float32(size))
    totals = np.empty((num_rows, group), dtype=np.float32)
    for row in range(num_rows):
        low, high = _span(positions[first_row + row], window, begin)
        flat = (first_row + row) * num_heads + head * group
        carray(floats(out + flat * size * 4), group * size)[:] = ZERO
        for each in range(group):
            own = weights[row, each, low:].ctypes.data
            totals[row, each] = exponentials(own, high - low, scale)
    for first in range(0, num, KEYS_AT_HAND):
        for row in range(num_rows):
            low, high = _seen(positions[first_row + row], window, begin, first, num)
            if low < high:
                flat = (first_row + row) * num_heads + head * group
                _weighted(weights[row], group, size, places, num_kv * size * 4, low, high,
                          out + flat * size * 4)  # fmt: skip
    for row in range(num_rows):
        flat = (first_row + row) * num_heads + head * group
        for each in range(group):
            result = carray(floats(out + (flat + each) * size * 4), size)
            for at in range(size):
                result[at] /= totals[row, each]


@inner
def _span(position, window, begin):
    """Which keys from `begin` on a row sees."""
    low = max(0, position + 1 - window) - begin if window else 0
    return low, position + 1 - begin


@inner
def _seen(position, window, begin, first, num):
    """Which of the keys at hand, from `first` on, a row sees."""
    low, high = _span(position, window, begin)
    return max(low, first), min(high, first + KEYS_AT_HAND, num)


@inner
def _products(queries, group, size, places, low, high, products):
    """Of queries with some of their keys."""
    if size % LANES == 0:
        runs, results = places[low:].ctypes.data, products[0, low:].ctypes.data
        dots(group, size // LANES, queries, runs, high - low, results, products.shape[1])
    else:
        for head in range(group):
            for index in range(low, high):
                products[head, index] = dot(queries + head * size * 4, places[index], size)


@inner
def _weighted(weights, group, size, places, offset, low, high, out):
    """Add some values times their weights to the sums."""
    vectors = size // LANES
    if size % LANES == 0:
        together = max(min(MOST_HEADS, MOST_VECTORS // vectors), 1)
        for head in range(0, group, together):
            heads = min(together, group - head)
            own, runs = weights[head, low:].ctypes.data, places[low:].ctypes.data
            for first in range(0, vectors, MOST_VECTORS):
                at = first * LANES * 4
                weigh(heads, min(vectors - first, MOST_VECTORS), own, weights.shape[1], runs,
                      offset + at, high - low, out + head * size * 4 + at)  # fmt: skip
    else:
        for head in range(group):
            result = carray(floats(out + head * size * 4), size)
            for index in range(low, high):
                values = carray(floats(places[index] + offset), size)
                for at in range(size):
                    result[at] += weights[head, index] * values[at]


@inner
def _attend_items(heads, num_heads, num_kv, size, layer, positions, tables, owners, table_width,
                  block, stride, window, out, span):  # fmt: skip
    """Some of all pairs of a row and a key head: row by row, so that memory is read in order.

    Consecutive rows of a sequence look at the keys of a head together.
    """
    item = span[0]
    while item < span[1]:
        row, first = item // num_kv, item % num_kv
        last = min(num_kv, first + span[1] - item)
        count = 1
        if last - first == num_kv:
            most = min(ROWS_AT_ONCE, (span[1] - item) // num_kv)
            while (
                count < most
                and owners[row + count] == owners[row]
                and positions[row + count] == positions[row] + count
            ):
                count += 1
        blocks = carray(integers(tables + owners[row] * table_width * 8), table_width)
        for head in range(first, last):
            _attend(heads, num_heads, num_kv, size, layer, positions, row, count, head, blocks,
                    block, stride, window, out)  # fmt: skip
        item += (last - first) * count


@kernel(void(*[int64] * 14))
def attend_alone(heads, num_rows, num_heads, num_kv, size, layer, positions, tables, owners,
                 table_width, block, stride, window, out):  # fmt: skip
    """`attend` in the calling thread."""
    where, whose = carray(integers(positions), num_rows), carray(integers(owners), num_rows)
    _attend_items(heads, num_heads, num_kv, size, layer, where, tables, whose, table_width,
                  block, stride, window, out, (0, num_rows * num_kv))  # fmt: skip


@kernel(void(*[int64] * 15), parallel=True)
def attend(heads, num_rows, num_heads, num_kv, size, layer, positions, tables, owners,
           table_width, block, stride, window, out, num_threads):  # fmt: skip
    """Each row's query heads over the keys up to its position, at most `window` if that is not 0.

    Row i is at `positions[i]` of the sequence whose blocks are `tables[owners[i]]`.
    """
    where, whose = carray(integers(positions), num_rows), carray(integers(owners), num_rows)
    items = num_rows * num_kv
    for thread in prange(num_threads):
        span = (thread * items // num_threads, (thread + 1) * items // num_threads)
        _attend_items(heads, num_heads, num_kv, size, layer, where, tables, whose, table_width,
                      block, stride, window, out, span)  # fmt: skip
