"""What a CPU computes of a float32 step, compiled: linears, attention and what lies between.

All take addresses of contiguous memory, since looking into arrays takes longer than some of the
work; 0 is for what there is not. A row's result is computed in one order from its own numbers, so
it has the same bits in whatever company, by however many threads. Nothing may be reordered here:
no function is compiled with `fastmath`.
"""

import numpy as np
from numba import carray, float64, int64, njit, prange, void

from cluster.models.tiles import (
    BLOCK,
    KEYS_AHEAD,
    LANES,
    MOST_HEADS,
    MOST_ROWS,
    MOST_VECTORS,
    chains,
    dot,
    dots,
    exp,
    exponentials,
    float_tile,
    floats,
    int8_tile,
    integers,
    weigh,
)

KEYS_AT_HAND = 64  # that all rows look at while the nearest cache has them
ROWS_AT_ONCE = 16
LAYER_COLUMNS = 15  # of the table of layers
PLACES_AHEAD = KEYS_AHEAD + LANES
AHEAD_BYTES = 4096  # of weights, fetched before their turn
CHUNK = 256  # columns that are passed over together
ONE, ZERO = np.float32(1), np.float32(0)

inner = njit(cache=True, error_model="numpy")


def kernel(signature, *, parallel=False):
    """Compile it now, or take what was compiled before."""
    return njit(signature, cache=True, error_model="numpy", nogil=True, parallel=parallel)


@inner
def _linear(x, num_rows, num_inputs, weights, num_outputs, scales, bias, residual, out, span):
    """The outputs of some blocks, for all rows."""
    scratch = np.empty((MOST_ROWS, BLOCK), dtype=np.float32)
    size = 1 if scales else 4
    block_bytes = num_inputs * BLOCK * size
    passes = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    for block in range(span[0], span[1]):
        first, packed = block * BLOCK, weights + block * block_bytes
        width = min(BLOCK, num_outputs - first)
        whole = width == BLOCK and not scales and not bias and not residual
        row = 0
        for index in range(passes):
            left = num_rows - row
            count = (left + passes - 1 - index) // (passes - index)
            rows = x + row * num_inputs * 4
            if passes == 1:
                ahead, ahead_step = packed + AHEAD_BYTES, BLOCK * size
            else:  # each its share of the next block
                ahead = packed + block_bytes + index * block_bytes // passes
                ahead_step = BLOCK * size // passes
            place = out + (row * num_outputs + first) * 4
            target = place if whole else np.int64(scratch.ctypes.data)
            apart = num_outputs if whole else BLOCK
            if scales:
                int8_tile(count, rows, num_inputs, packed, num_inputs, target, apart, ahead,
                          ahead_step)  # fmt: skip
            else:
                float_tile(count, rows, num_inputs, packed, num_inputs, target, apart, ahead,
                           ahead_step)  # fmt: skip
            if not whole:
                _finish(scratch, count, width, first, row, num_outputs, scales, bias, residual, out)
            row += count


@inner
def _finish(scratch, count, width, first, row, num_outputs, scales, bias, residual, out):
    """Scale, add what is to be added and put a tile's sums where they belong."""
    for index in range(count):
        begin = ((row + index) * num_outputs + first) * 4
        sums = scratch[index]
        if scales:
            scale = carray(floats(scales + first * 4), BLOCK)
            for column in range(width):
                sums[column] *= scale[column]
        if bias:
            more = carray(floats(bias + first * 4), BLOCK)
            for column in range(width):
                sums[column] += more[column]
        if residual:
            more = carray(floats(residual + begin), BLOCK)
            for column in range(width):
                sums[column] += more[column]
        result = carray(floats(out + begin), BLOCK)
        for column in range(width):
            result[column] = sums[column]


@kernel(void(*[int64] * 9))
def linear_alone(x, num_rows, num_inputs, weights, num_outputs, scales, bias, residual, out):
    """`linear` in the calling thread."""
    span = (0, (num_outputs + BLOCK - 1) // BLOCK)
    _linear(x, num_rows, num_inputs, weights, num_outputs, scales, bias, residual, out, span)


@kernel(void(*[int64] * 10), parallel=True)
def linear(x, num_rows, num_inputs, weights, num_outputs, scales, bias, residual, out, num_threads):
    """`out = x W^T + bias + residual`; weights in blocks, int8 if there are scales."""
    blocks = (num_outputs + BLOCK - 1) // BLOCK
    for thread in prange(num_threads):
        span = (thread * blocks // num_threads, (thread + 1) * blocks // num_threads)
        _linear(x, num_rows, num_inputs, weights, num_outputs, scales, bias, residual, out, span)


@kernel(void(int64, int64, int64, int64, float64, int64))
def norm(x, num_rows, size, weight, epsilon, out):
    """RMSNorm of every row."""
    for row in range(num_rows):
        begin = row * size * 4
        numbers, result = carray(floats(x + begin), size), carray(floats(out + begin), size)
        mean = dot(x + begin, x + begin, size) / np.float32(size)
        scale = ONE / np.sqrt(mean + np.float32(epsilon))
        for index in range(size):
            result[index] = numbers[index] * scale
        if weight:
            weights = carray(floats(weight), size)
            for index in range(size):
                result[index] *= weights[index]


@kernel(void(*[int64] * 4))
def swiglu(gate_up, num_rows, size, out):
    """`silu(gate) * up` of rows that have both side by side."""
    for row in range(num_rows):
        gate = carray(floats(gate_up + 2 * row * size * 4), size)
        up = carray(floats(gate_up + (2 * row + 1) * size * 4), size)
        result = carray(floats(out + row * size * 4), size)
        for index in range(size):
            result[index] = gate[index] / (ONE + exp(-gate[index])) * up[index]


@kernel(int64(*[int64] * 8))
def candidates(estimates, num_rows, size, bounds, lengths, rows, columns, most):
    """What could be the largest of each row of estimates, each off by its bound times the row's.

    Fills `rows` and `columns` with up to `most` places, and returns how many there are.
    """
    errors, scale = carray(floats(bounds), size), carray(floats(lengths), num_rows)
    found_rows, found_columns = carray(integers(rows), most), carray(integers(columns), most)
    num_chunks = (size + CHUNK - 1) // CHUNK
    most_of = np.empty(num_chunks, dtype=np.float32)
    lower, upper = np.empty(LANES, dtype=np.float32), np.empty(LANES, dtype=np.float32)
    num = 0
    for row in range(num_rows):
        numbers = carray(floats(estimates + row * size * 4), size)
        length = scale[row]
        lower[:] = -np.inf
        for chunk in range(num_chunks):
            begin, end = chunk * CHUNK, min((chunk + 1) * CHUNK, size)
            whole = end - (end - begin) % LANES
            upper[:] = -np.inf
            for first in range(begin, whole, LANES):
                for lane in range(LANES):
                    error = length * errors[first + lane]
                    lower[lane] = max(lower[lane], numbers[first + lane] - error)
                    upper[lane] = max(upper[lane], numbers[first + lane] + error)
            for column in range(whole, end):
                error = length * errors[column]
                lower[0] = max(lower[0], numbers[column] - error)
                upper[0] = max(upper[0], numbers[column] + error)
            most_of[chunk] = upper.max()
        least = lower.max()
        for chunk in range(num_chunks):
            if most_of[chunk] >= least:
                for column in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size)):
                    if numbers[column] + length * errors[column] >= least:
                        if num < most:
                            found_rows[num], found_columns[num] = row, column
                        num += 1
    return num


@kernel(void(*[int64] * 5))
def products(left, right, num_runs, num, out):
    """Of so many pairs of runs, a multiple of LANES, each with the bits that `linear` gives it."""
    for first in range(0, num_runs, LANES):
        chains(left + first * 8, right + first * 8, num, out + first * 4)


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


@inner
def _product(place, x, num_rows, num_inputs, num_outputs, residual, out, num_threads):
    """A linear of which weights, scales and bias are at `place`, three addresses."""
    weights, scales, bias = place[0], place[1], place[2]
    if num_threads == 1:
        linear_alone(x, num_rows, num_inputs, weights, num_outputs, scales, bias, residual, out)
    else:
        linear(
            x, num_rows, num_inputs, weights, num_outputs, scales, bias, residual, out, num_threads
        )


@kernel(void(*[int64] * 21, float64))
def layers(table, num_layers, hidden, num_rows, hidden_size, inner_size, num_heads, num_kv, size,
           factors, cache, layer_bytes, slots, positions, tables, owners, table_width, block,
           stride, num_threads, num_attending, epsilon):  # fmt: skip
    """All layers, over `hidden`, in place.

    `table` has LAYER_COLUMNS addresses or numbers for each layer: weight, scales and bias of qkv,
    of output, of gate and up, and of down; the weights of both norms; and the window.
    """
    width = (num_heads + 2 * num_kv) * size
    each = hidden_size + width + num_heads * size + 3 * inner_size
    memory = np.empty(num_rows * each, dtype=np.float32)
    normed_at = np.int64(memory.ctypes.data)
    heads_at = normed_at + 4 * num_rows * hidden_size
    attended_at = heads_at + 4 * num_rows * width
    gate_up_at = attended_at + 4 * num_rows * num_heads * size
    activated_at = gate_up_at + 4 * num_rows * 2 * inner_size
    rows = carray(integers(table), (num_layers, LAYER_COLUMNS))
    for index in range(num_layers):
        row, layer = rows[index], cache + index * layer_bytes
        norm(hidden, num_rows, hidden_size, row[12], epsilon, normed_at)
        _product(row[0:3], normed_at, num_rows, hidden_size, width, 0, heads_at, num_threads)
        enter(heads_at, factors, num_rows, num_heads, num_kv, size, layer, slots)
        if num_attending == 1:
            attend_alone(heads_at, num_rows, num_heads, num_kv, size, layer, positions, tables,
                         owners, table_width, block, stride, row[14], attended_at)  # fmt: skip
        else:
            attend(heads_at, num_rows, num_heads, num_kv, size, layer, positions, tables, owners,
                   table_width, block, stride, row[14], attended_at, num_attending)  # fmt: skip
        _product(row[3:6], attended_at, num_rows, num_heads * size, hidden_size, hidden, hidden,
                 num_threads)  # fmt: skip
        norm(hidden, num_rows, hidden_size, row[13], epsilon, normed_at)
        _product(row[6:9], normed_at, num_rows, hidden_size, 2 * inner_size, 0, gate_up_at,
                 num_threads)  # fmt: skip
        swiglu(gate_up_at, num_rows, inner_size, activated_at)
        _product(row[9:12], activated_at, num_rows, inner_size, hidden_size, hidden, hidden,
                 num_threads)  # fmt: skip
    memory[0] = ZERO  # or it would be given back after the last look at the array itself
