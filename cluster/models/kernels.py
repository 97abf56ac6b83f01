"""What a CPU computes of a float32 step, compiled: linears, what lies between, and all layers.

All take addresses of contiguous memory, since looking into arrays takes longer than some of the
work; 0 is for what there is not. A row's result is computed in one order from its own numbers, so
it has the same bits in whatever company, by however many threads.
"""

import numpy as np
from numba import carray, float64, int64, prange, void

from cluster.jit import inner, kernel
from cluster.models.attention_kernels import attend, attend_alone, enter
from cluster.models.emit import LANES
from cluster.models.tiles import (
    BLOCK,
    MOST_ROWS,
    chains,
    dot,
    exp,
    float_tile,
    floats,
    int8_tile,
    integers,
)

LAYER_COLUMNS = 15  # of the table of layers
AHEAD_BYTES = 4096  # of weights, fetched before their turn
CHUNK = 256  # columns that are passed over together
ONE, ZERO = np.float32(1), np.float32(0)


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
