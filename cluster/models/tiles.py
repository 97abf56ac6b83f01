"""The innermost pieces of the compiled kernels, in vectors: what a compiler would not find alone.

Each is made of LLVM's own instructions and takes addresses, in bytes, as integers. A value of a
result is summed in one order, whatever is computed beside it.

    tile   rows times a block of packed weights: every accumulator stays in a register, and weights
           stream by once for all rows, so that eight rows cost little more than one
    dot    two runs of numbers
    chains some pairs of runs, as a tile would have them
    dots   some runs with many: queries and their keys
    weigh  weighted sums of many runs: the queries' values
    exp    of one number; exponentials of a softmax
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cluster.models import emit
from cluster.models.emit import (
    FLOAT,
    INT64,
    IS_WIDE,
    LANES,
    LINE_BYTES,
    VECTOR,
    Builder,
    Value,
)

VECTORS = 2  # side by side in a block
BLOCK = LANES * VECTORS  # outputs of a block of packed weights
MOST_ROWS = 12 if IS_WIDE else 6  # of a tile: as many as leave registers for weights and inputs
KEYS_AHEAD = 32  # fetched before their turn


def _tile_of(*, int8: bool) -> Any:
    """Up to MOST_ROWS rows times one block of `[num_inputs, BLOCK]` weights.

    They are float32, or int8 and each taken for the number that it is. Rows of `x` lie `ldx`
    numbers apart, those of `out` `ldout`. With each input, what lies at `ahead` is fetched into
    caches, which goes on by `ahead_step` bytes.
    """

    def generate(context: Any, builder: Builder, _: Any, arguments: list[Value]) -> Value:
        num_rows, *others = arguments
        counts = range(1, MOST_ROWS + 1)
        emit.switch(
            builder,
            num_rows,
            {each: partial(_tile, builder, others, num_rows=each, int8=int8) for each in counts},
        )
        return context.get_dummy_value()

    @intrinsic
    def tile(
        context: Any,
        num_rows: Any,
        x: Any,
        ldx: Any,
        weights: Any,
        num_inputs: Any,
        out: Any,
        ldout: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        del context
        arguments = (num_rows, x, ldx, weights, num_inputs, out, ldout, ahead, ahead_step)
        return types.void(*arguments), generate

    return tile


def _tile(builder: Builder, arguments: list[Value], *, num_rows: int, int8: bool) -> None:
    x, ldx, weights, num_inputs, out, ldout, ahead, ahead_step = arguments
    size = 1 if int8 else 4
    rows = [emit.at(builder, x, builder.mul(ldx, INT64(row)), 4) for row in range(num_rows)]

    def accumulate(k: Value, sums: list[Value]) -> list[Value]:
        first = builder.mul(k, INT64(BLOCK))
        fetched = builder.add(ahead, builder.mul(k, ahead_step))
        for offset in range(0, BLOCK * size, LINE_BYTES):
            emit.prefetch(builder, builder.add(fetched, INT64(offset)))
        block = []
        for vector in range(VECTORS):
            offset = INT64(vector * LANES)
            place = emit.at(builder, weights, builder.add(first, offset), size)
            block.append(emit.levels(builder, place) if int8 else emit.load(builder, place, VECTOR))
        inputs = [
            emit.spread(builder, emit.load(builder, emit.at(builder, row, k, 4), FLOAT))
            for row in rows
        ]
        pairs = [(number, weight) for number in inputs for weight in block]
        return [
            emit.fma(builder, number, weight, total)
            for (number, weight), total in zip(pairs, sums, strict=True)
        ]

    zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * (num_rows * VECTORS)
    totals = emit.loop(builder, num_inputs, zeros, accumulate)
    for index, total in enumerate(totals):
        row, vector = divmod(index, VECTORS)
        offset = builder.add(builder.mul(ldout, INT64(row)), INT64(vector * LANES))
        emit.store(builder, total, emit.at(builder, out, offset, 4))


float_tile = _tile_of(int8=False)
int8_tile = _tile_of(int8=True)


@intrinsic
def floats(context: Any, address: Any) -> Any:
    """A pointer to the float32 numbers at an address."""
    del context

    return types.CPointer(types.float32)(address), _pointer_to(FLOAT)


@intrinsic
def integers(context: Any, address: Any) -> Any:
    """A pointer to the int64 numbers at an address."""
    del context

    return types.CPointer(types.int64)(address), _pointer_to(INT64)


def _pointer_to(kind: Any) -> Callable[..., Value]:
    def generate(_: Any, builder: Builder, __: Any, arguments: list[Value]) -> Value:
        return emit.pointer(builder, arguments[0], kind)

    return generate


@intrinsic
def exp(context: Any, x: Any) -> Any:
    """Compute e to a float32, to some two units of the last place."""
    del context

    def generate(_: Any, builder: Builder, __: Any, arguments: list[Value]) -> Value:
        return emit.exp(builder, arguments[0])

    return types.float32(x), generate


@intrinsic
def dots(
    context: Any,
    num_heads: Any,
    num_vectors: Any,
    queries: Any,
    places: Any,
    num: Any,
    out: Any,
    apart: Any,
) -> Any:
    """Some queries' products with each of `num` runs, whose addresses are at `places`.

    All have `num_vectors` times LANES numbers; queries lie one after another. The products of one
    begin `apart` numbers after those of the one before. LANES runs are looked at together: `out` is
    written up to the next multiple of LANES, and places must go on for KEYS_AHEAD more.
    """
    del context

    def generate(context: Any, builder: Builder, _: Any, arguments: list[Value]) -> Value:
        num_heads, num_vectors, queries, places, num, out, apart = arguments
        num_bytes = builder.mul(num_vectors, INT64(4 * LANES))
        groups = builder.udiv(builder.add(num, INT64(LANES - 1)), INT64(LANES))

        def group(number: Value, _: list[Value]) -> list[Value]:
            first = builder.mul(number, INT64(LANES))

            def run(at: int) -> Value:
                return emit.place(builder, places, builder.add(first, INT64(at)))

            runs = [run(lane) for lane in range(LANES)]
            emit.fetch_runs(builder, [run(KEYS_AHEAD + lane) for lane in range(LANES)], num_bytes)

            def head(head: Value, _: list[Value]) -> list[Value]:
                query = builder.add(queries, builder.mul(head, num_bytes))

                def accumulate(vector: Value, sums: list[Value]) -> list[Value]:
                    offset = builder.mul(vector, INT64(4 * LANES))
                    numbers = emit.load(builder, builder.add(query, offset), VECTOR)
                    return [
                        emit.fma(
                            builder,
                            numbers,
                            emit.load(builder, builder.add(run, offset), VECTOR),
                            sum_,
                        )
                        for run, sum_ in zip(runs, sums, strict=True)
                    ]

                zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * LANES
                totals = emit.sums(builder, emit.loop(builder, num_vectors, zeros, accumulate))
                at = builder.add(first, builder.mul(apart, head))
                emit.store(builder, totals, emit.at(builder, out, at, 4))
                return []

            emit.loop(builder, num_heads, [], head)
            return []

        emit.loop(builder, groups, [], group)
        return context.get_dummy_value()

    return types.void(num_heads, num_vectors, queries, places, num, out, apart), generate


@intrinsic
def chains(context: Any, left: Any, right: Any, num: Any, out: Any) -> Any:
    """LANES products of two runs of `num` numbers, whose addresses are at `left` and `right`.

    They are summed one after another, so that they have the bits of what `tile` computes.
    """
    del context

    def generate(context: Any, builder: Builder, _: Any, arguments: list[Value]) -> Value:
        *places, num, out = arguments
        runs = [
            [emit.place(builder, side, INT64(lane)) for side in places] for lane in range(LANES)
        ]

        def one(index: Value, sums: list[Value]) -> list[Value]:
            after = []
            for pair, total in zip(runs, sums, strict=True):
                x, y = (emit.load(builder, emit.at(builder, run, index, 4), FLOAT) for run in pair)
                after.append(emit.fma(builder, x, y, total))
            return after

        for lane, total in enumerate(emit.loop(builder, num, [FLOAT(0.0)] * LANES, one)):
            emit.store(builder, total, emit.at(builder, out, INT64(lane), 4))
        return context.get_dummy_value()

    return types.void(left, right, num, out), generate


@intrinsic
def weigh(
    context: Any,
    num_heads: Any,
    num_vectors: Any,
    weights: Any,
    apart: Any,
    places: Any,
    offset: Any,
    num: Any,
    out: Any,
) -> Any:
    """Add to some sums the same `num` runs, each times weights of its own.

    Runs begin `offset` bytes after what is at `places`; all have `num_vectors` times LANES numbers.
    The weights of a sum begin `apart` numbers after those of the one before; sums lie one after
    another. Places must go on for KEYS_AHEAD more.
    """
    del context

    def generate(context: Any, builder: Builder, _: Any, arguments: list[Value]) -> Value:
        num_heads, num_vectors, weights, apart, places, offset, num, out = arguments

        def of_size(heads: int, vectors: int) -> None:
            def one(index: Value, sums: list[Value]) -> list[Value]:
                place = builder.add(emit.place(builder, places, index), offset)
                later = emit.place(builder, places, builder.add(index, INT64(KEYS_AHEAD)))
                for line in range(0, 4 * LANES * vectors, LINE_BYTES):
                    emit.prefetch(builder, builder.add(builder.add(later, offset), INT64(line)))
                values = [
                    emit.load(builder, builder.add(place, INT64(4 * LANES * vector)), VECTOR)
                    for vector in range(vectors)
                ]
                after = []
                for head in range(heads):
                    at = builder.add(index, builder.mul(apart, INT64(head)))
                    weight = emit.spread(
                        builder, emit.load(builder, emit.at(builder, weights, at, 4), FLOAT)
                    )
                    own = sums[head * vectors : (head + 1) * vectors]
                    after += [
                        emit.fma(builder, weight, value, total)
                        for value, total in zip(values, own, strict=True)
                    ]
                return after

            sums = [builder.add(out, INT64(4 * LANES * at)) for at in range(heads * vectors)]
            before = [emit.load(builder, place, VECTOR) for place in sums]
            for place, total in zip(sums, emit.loop(builder, num, before, one), strict=True):
                emit.store(builder, total, place)

        emit.by_size(builder, num_heads, num_vectors, of_size)
        return context.get_dummy_value()

    return types.void(num_heads, num_vectors, weights, apart, places, offset, num, out), generate


@intrinsic
def exponentials(context: Any, scores: Any, num: Any, scale: Any) -> Any:
    """Replace each of `num` scores by e to its distance from the largest, scaled; returns the sum.

    Up to the next multiple of LANES more is overwritten.
    """
    del context

    def generate(_: Any, builder: Builder, __: Any, arguments: list[Value]) -> Value:
        scores, num, scale = arguments
        lowest = ir.Constant(VECTOR, [-float("inf")] * LANES)
        groups = builder.udiv(builder.add(num, INT64(LANES - 1)), INT64(LANES))

        def place(group: Value) -> Value:
            return emit.at(builder, scores, builder.mul(group, INT64(LANES)), 4)

        def end(index: Value, _: list[Value]) -> list[Value]:
            at = emit.at(builder, scores, builder.add(num, index), 4)
            emit.store(builder, FLOAT(-float("inf")), at)
            return []

        def larger(group: Value, most: list[Value]) -> list[Value]:
            return [emit.larger(builder, most[0], emit.load(builder, place(group), VECTOR))]

        def power(group: Value, sums: list[Value]) -> list[Value]:
            at = place(group)
            distance = builder.fsub(emit.load(builder, at, VECTOR), largest)
            value = emit.exp(builder, builder.fmul(distance, factor))
            emit.store(builder, value, at)
            return [builder.fadd(sums[0], value)]

        rest = builder.sub(builder.mul(groups, INT64(LANES)), num)
        emit.loop(builder, rest, [], end)
        [most] = emit.loop(builder, groups, [lowest], larger)
        largest = emit.spread(builder, emit.folded(builder, most, partial(emit.larger, builder)))
        factor = emit.spread(builder, scale)
        [total] = emit.loop(builder, groups, [ir.Constant(VECTOR, [0.0] * LANES)], power)
        return emit.lanes_total(builder, total)

    return types.float32(scores, num, scale), generate


@intrinsic
def dot(context: Any, x: Any, y: Any, num: Any) -> Any:
    """`dot(x, y, num)`: the sum of products of two runs of `num` float32 numbers."""
    del context

    def generate(_: Any, builder: Builder, __: Any, arguments: list[Value]) -> Value:
        x, y, num = arguments

        def whole(index: Value, sums: list[Value]) -> list[Value]:
            first = builder.mul(index, INT64(LANES))
            left, right = (
                emit.load(builder, emit.at(builder, run, first, 4), VECTOR) for run in (x, y)
            )
            return [emit.fma(builder, left, right, sums[0])]

        num_whole = builder.udiv(num, INT64(LANES))
        [total] = emit.loop(builder, num_whole, [ir.Constant(VECTOR, [0.0] * LANES)], whole)
        begin = builder.mul(num_whole, INT64(LANES))

        def rest(index: Value, sums: list[Value]) -> list[Value]:
            at = builder.add(begin, index)
            left, right = (
                emit.load(builder, emit.at(builder, run, at, 4), FLOAT) for run in (x, y)
            )
            return [builder.fadd(sums[0], builder.fmul(left, right))]

        [result] = emit.loop(
            builder, builder.sub(num, begin), [emit.lanes_total(builder, total)], rest
        )
        return result

    return types.float32(x, y, num), generate
