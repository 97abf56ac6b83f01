"""The innermost pieces of the compiled kernels, in vectors: what a compiler would not find alone.

Each is made of LLVM's own instructions and takes addresses, in bytes, as integers. A value of a
result is summed in one order, whatever is computed beside it.

    tile   rows times a block of packed weights: every accumulator stays in a register, and weights
           stream by once for all rows, so that eight rows cost little more than one
    dot    two runs of numbers
    chains some pairs of runs, as a tile would have them
    dots   some runs with many: queries and their keys
    weigh  weighted sums of many runs: the queries' values
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Builder = Any  # llvmlite has no types
Value = Any

IS_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if IS_WIDE else 8
VECTORS = 2  # side by side in a block
BLOCK = LANES * VECTORS  # outputs of a block of packed weights
MOST_ROWS = 12 if IS_WIDE else 6  # of a tile: as many as leave registers for weights and inputs
MOST_VECTORS = 16 if IS_WIDE else 8  # of all queries that are looked at together
MOST_HEADS = 4
LINE_BYTES = 64  # of a cache
KEYS_AHEAD = 32  # fetched before their turn

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXPONENTIAL = (  # of the polynomial on [-ln 2 / 2, ln 2 / 2], from the highest power down
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LEAST_EXPONENT, MOST_EXPONENT = -87.0, 88.0

INT64, INT32, INT8, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
BYTES = ir.PointerType(INT8)


def _tile_of(*, int8: bool) -> Any:
    """Up to MOST_ROWS rows times one block of `[num_inputs, BLOCK]` weights.

    They are float32, or int8 and each taken for the number that it is. Rows of `x` lie `ldx`
    numbers apart, those of `out` `ldout`. With each input, what lies at `ahead` is fetched into
    caches, which goes on by `ahead_step` bytes.
    """

    def generate(context: Any, builder: Builder, _: Any, arguments: list[Value]) -> Value:
        num_rows, *others = arguments
        counts = range(1, MOST_ROWS + 1)
        _switch(
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
    rows = [_at(builder, x, builder.mul(ldx, INT64(row)), 4) for row in range(num_rows)]

    def accumulate(k: Value, sums: list[Value]) -> list[Value]:
        first = builder.mul(k, INT64(BLOCK))
        fetched = builder.add(ahead, builder.mul(k, ahead_step))
        for offset in range(0, BLOCK * size, LINE_BYTES):
            _prefetch(builder, builder.add(fetched, INT64(offset)))
        block = []
        for vector in range(VECTORS):
            offset = INT64(vector * LANES)
            place = _at(builder, weights, builder.add(first, offset), size)
            block.append(_levels(builder, place) if int8 else _load(builder, place, VECTOR))
        inputs = [_spread(builder, _load(builder, _at(builder, row, k, 4), FLOAT)) for row in rows]
        pairs = [(number, weight) for number in inputs for weight in block]
        return [
            _fma(builder, number, weight, total)
            for (number, weight), total in zip(pairs, sums, strict=True)
        ]

    zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * (num_rows * VECTORS)
    totals = _loop(builder, num_inputs, zeros, accumulate)
    for index, total in enumerate(totals):
        row, vector = divmod(index, VECTORS)
        offset = builder.add(builder.mul(ldout, INT64(row)), INT64(vector * LANES))
        _store(builder, total, _at(builder, out, offset, 4))


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
        return _pointer(builder, arguments[0], kind)

    return generate


@intrinsic
def exp(context: Any, x: Any) -> Any:
    """Compute e to a float32, to some two units of the last place."""
    del context

    def generate(_: Any, builder: Builder, __: Any, arguments: list[Value]) -> Value:
        return _exp(builder, arguments[0])

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
                return _place(builder, places, builder.add(first, INT64(at)))

            runs = [run(lane) for lane in range(LANES)]
            _fetch_runs(builder, [run(KEYS_AHEAD + lane) for lane in range(LANES)], num_bytes)

            def head(head: Value, _: list[Value]) -> list[Value]:
                query = builder.add(queries, builder.mul(head, num_bytes))

                def accumulate(vector: Value, sums: list[Value]) -> list[Value]:
                    offset = builder.mul(vector, INT64(4 * LANES))
                    numbers = _load(builder, builder.add(query, offset), VECTOR)
                    return [
                        _fma(
                            builder, numbers, _load(builder, builder.add(run, offset), VECTOR), sum_
                        )
                        for run, sum_ in zip(runs, sums, strict=True)
                    ]

                zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * LANES
                totals = _sums(builder, _loop(builder, num_vectors, zeros, accumulate))
                at = builder.add(first, builder.mul(apart, head))
                _store(builder, totals, _at(builder, out, at, 4))
                return []

            _loop(builder, num_heads, [], head)
            return []

        _loop(builder, groups, [], group)
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
        runs = [[_place(builder, side, INT64(lane)) for side in places] for lane in range(LANES)]

        def one(index: Value, sums: list[Value]) -> list[Value]:
            after = []
            for pair, total in zip(runs, sums, strict=True):
                x, y = (_load(builder, _at(builder, run, index, 4), FLOAT) for run in pair)
                after.append(_fma(builder, x, y, total))
            return after

        for lane, total in enumerate(_loop(builder, num, [FLOAT(0.0)] * LANES, one)):
            _store(builder, total, _at(builder, out, INT64(lane), 4))
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
                place = builder.add(_place(builder, places, index), offset)
                later = _place(builder, places, builder.add(index, INT64(KEYS_AHEAD)))
                for line in range(0, 4 * LANES * vectors, LINE_BYTES):
                    _prefetch(builder, builder.add(builder.add(later, offset), INT64(line)))
                values = [
                    _load(builder, builder.add(place, INT64(4 * LANES * vector)), VECTOR)
                    for vector in range(vectors)
                ]
                after = []
                for head in range(heads):
                    at = builder.add(index, builder.mul(apart, INT64(head)))
                    weight = _spread(builder, _load(builder, _at(builder, weights, at, 4), FLOAT))
                    own = sums[head * vectors : (head + 1) * vectors]
                    after += [
                        _fma(builder, weight, value, total)
                        for value, total in zip(values, own, strict=True)
                    ]
                return after

            sums = [builder.add(out, INT64(4 * LANES * at)) for at in range(heads * vectors)]
            before = [_load(builder, place, VECTOR) for place in sums]
            for place, total in zip(sums, _loop(builder, num, before, one), strict=True):
                _store(builder, total, place)

        _by_size(builder, num_heads, num_vectors, of_size)
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
            return _at(builder, scores, builder.mul(group, INT64(LANES)), 4)

        def end(index: Value, _: list[Value]) -> list[Value]:
            at = _at(builder, scores, builder.add(num, index), 4)
            _store(builder, FLOAT(-float("inf")), at)
            return []

        def larger(group: Value, most: list[Value]) -> list[Value]:
            return [_larger(builder, most[0], _load(builder, place(group), VECTOR))]

        def power(group: Value, sums: list[Value]) -> list[Value]:
            at = place(group)
            distance = builder.fsub(_load(builder, at, VECTOR), largest)
            value = _exp(builder, builder.fmul(distance, factor))
            _store(builder, value, at)
            return [builder.fadd(sums[0], value)]

        rest = builder.sub(builder.mul(groups, INT64(LANES)), num)
        _loop(builder, rest, [], end)
        [most] = _loop(builder, groups, [lowest], larger)
        largest = _spread(builder, _folded(builder, most, partial(_larger, builder)))
        factor = _spread(builder, scale)
        [total] = _loop(builder, groups, [ir.Constant(VECTOR, [0.0] * LANES)], power)
        return _sum(builder, total)

    return types.float32(scores, num, scale), generate


@intrinsic
def dot(context: Any, x: Any, y: Any, num: Any) -> Any:
    """`dot(x, y, num)`: the sum of products of two runs of `num` float32 numbers."""
    del context

    def generate(_: Any, builder: Builder, __: Any, arguments: list[Value]) -> Value:
        x, y, num = arguments

        def whole(index: Value, sums: list[Value]) -> list[Value]:
            first = builder.mul(index, INT64(LANES))
            left, right = (_load(builder, _at(builder, run, first, 4), VECTOR) for run in (x, y))
            return [_fma(builder, left, right, sums[0])]

        num_whole = builder.udiv(num, INT64(LANES))
        [total] = _loop(builder, num_whole, [ir.Constant(VECTOR, [0.0] * LANES)], whole)
        begin = builder.mul(num_whole, INT64(LANES))

        def rest(index: Value, sums: list[Value]) -> list[Value]:
            at = builder.add(begin, index)
            left, right = (_load(builder, _at(builder, run, at, 4), FLOAT) for run in (x, y))
            return [builder.fadd(sums[0], builder.fmul(left, right))]

        [result] = _loop(builder, builder.sub(num, begin), [_sum(builder, total)], rest)
        return result

    return types.float32(x, y, num), generate


def _switch(builder: Builder, key: Value, cases: Mapping[int, Callable[[], None]]) -> None:
    """What is generated for each key, of which that of the key at hand is run."""
    done = builder.append_basic_block("done")
    choice = builder.switch(key, done)
    for number, generate in cases.items():
        case = builder.append_basic_block(f"case{number}")
        choice.add_case(INT64(number), case)
        builder.position_at_end(case)
        generate()
        builder.branch(done)
    builder.position_at_end(done)


def _by_size(
    builder: Builder, heads: Value, vectors: Value, generate: Callable[[int, int], None]
) -> None:
    """One case for each number of heads and of vectors that registers hold."""
    cases = {
        num_vectors * (MOST_HEADS + 1) + num_heads: partial(generate, num_heads, num_vectors)
        for num_vectors in range(1, MOST_VECTORS + 1)
        for num_heads in range(1, min(MOST_HEADS, MOST_VECTORS // num_vectors) + 1)
    }
    key = builder.add(builder.mul(vectors, INT64(MOST_HEADS + 1)), heads)
    _switch(builder, key, cases)


def _loop(
    builder: Builder,
    count: Value,
    values: list[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """Carry the values through `count` rounds, which may be none."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, INT64(0)), loop, done)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    carried = [builder.phi(value.type) for value in values]
    after = body(index, carried)
    following = builder.add(index, INT64(1))
    index.add_incoming(INT64(0), before)
    end = builder.block  # of the body, which may have loops of its own
    index.add_incoming(following, end)
    for phi, value, result in zip(carried, values, after, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(result, end)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    results = [builder.phi(value.type) for value in values]
    for phi, value, result in zip(results, values, after, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(result, end)
    return results


def _sum(builder: Builder, vector: Value) -> Value:
    """All lanes together."""
    return _folded(builder, vector, builder.fadd)


def _folded(builder: Builder, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
    """All lanes in one: halves joined to one another time and again."""
    undefined, half = ir.Constant(VECTOR, ir.Undefined), LANES // 2
    while half:
        order = [(lane + half) % LANES for lane in range(LANES)]
        vector = join(vector, _shuffled(builder, vector, undefined, order))
        half //= 2
    return builder.extract_element(vector, INT32(0))


def _larger(builder: Builder, left: Value, right: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _exp(builder: Builder, x: Value) -> Value:
    """Compute e to the x, a vector or a number, to some two units of the last place."""
    num_lanes = LANES if x.type == VECTOR else 0
    whole = ir.VectorType(INT32, LANES) if num_lanes else INT32

    def everywhere(kind: Any, number: float) -> Value:
        return ir.Constant(kind, [number] * num_lanes if num_lanes else number)

    number = partial(everywhere, x.type)
    x = _larger(builder, x, number(LEAST_EXPONENT))
    is_more = builder.fcmp_ordered(">", x, number(MOST_EXPONENT))
    x = builder.select(is_more, number(MOST_EXPONENT), x)
    shifted = builder.fadd(builder.fmul(x, number(LOG2_E)), number(0.5))
    power = _call(builder, "floor", shifted)
    minus = builder.fneg(power)
    rest = _fma(builder, minus, number(LN2_LOW), _fma(builder, minus, number(LN2_HIGH), x))
    polynomial = number(EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        polynomial = _fma(builder, polynomial, rest, number(coefficient))
    square = builder.fmul(rest, rest)
    value = builder.fadd(_fma(builder, polynomial, square, rest), number(1.0))
    exponent = builder.add(builder.fptosi(power, whole), everywhere(whole, 127))
    scale = builder.bitcast(builder.shl(exponent, everywhere(whole, 23)), x.type)
    return builder.fmul(value, scale)


def _sums(builder: Builder, vectors: list[Value]) -> Value:
    """The sum over the lanes of each of LANES vectors; all are summed in the same order.

    Two vectors become one that has half as many sums of each, and so on; first within four lanes,
    where shuffling is cheap.
    """
    fours = range(0, LANES, 4)
    low = [lane for at in fours for lane in (at, LANES + at, at + 1, LANES + at + 1)]
    high = [lane + 2 for lane in low]
    even = [lane for at in range(0, 2 * LANES, 8) for lane in range(at, at + 4)]
    odd = [lane + 4 for lane in even]

    def joined(left: Value, right: Value, these: list[int], those: list[int]) -> Value:
        shuffled = [_shuffled(builder, left, right, order) for order in (these, those)]
        return builder.fadd(*shuffled)

    totals = []
    for at in fours:
        first, second, third, fourth = vectors[at : at + 4]
        pair, other = joined(first, third, low, high), joined(second, fourth, low, high)
        totals.append(joined(pair, other, low, high))
    while len(totals) > 1:
        pairs = zip(totals[::2], totals[1::2], strict=True)
        totals = [joined(left, right, even, odd) for left, right in pairs]
    return totals[0]


def _shuffled(builder: Builder, left: Value, right: Value, order: list[int]) -> Value:
    """Lanes of the two, counted through."""
    mask = ir.Constant(ir.VectorType(INT32, LANES), order)
    return builder.shuffle_vector(left, right, mask)


def _at(builder: Builder, address: Value, index: Value, size: int) -> Value:
    """The address of an element of `size` bytes."""
    return builder.add(address, builder.mul(index, INT64(size)))


def _pointer(builder: Builder, address: Value, kind: Any) -> Value:
    return builder.inttoptr(address, ir.PointerType(kind))


def _load(builder: Builder, address: Value, kind: Any, align: int = 4) -> Value:
    value = builder.load(_pointer(builder, address, kind))
    value.align = align
    return value


def _place(builder: Builder, places: Value, index: Value) -> Value:
    """One of some addresses."""
    return _load(builder, _at(builder, places, index, 8), INT64, align=8)


def _store(builder: Builder, value: Value, address: Value) -> None:
    """Put a vector or a number of float32."""
    builder.store(value, _pointer(builder, address, value.type)).align = 4


def _levels(builder: Builder, address: Value) -> Value:
    """A vector of int8 levels, as float32."""
    levels = _load(builder, address, ir.VectorType(INT8, LANES), align=1)
    return builder.sitofp(builder.sext(levels, ir.VectorType(INT32, LANES)), VECTOR)


def _spread(builder: Builder, number: Value) -> Value:
    """The number in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, number, INT32(0))
    return _shuffled(builder, one, undefined, [0] * LANES)


def _fma(builder: Builder, left: Value, right: Value, total: Value) -> Value:
    """Add left * right to total, vectors or numbers, rounded once."""
    return _call(builder, "fma", left, right, total)


def _call(builder: Builder, name: str, *values: Value) -> Value:
    """One of LLVM's own functions of float32, of vectors or numbers."""
    [kind] = {value.type for value in values}
    suffix = f"v{LANES}f32" if kind == VECTOR else "f32"
    declared = ir.FunctionType(kind, [kind] * len(values))
    function = cgutils.get_or_insert_function(builder.module, declared, f"llvm.{name}.{suffix}")
    return builder.call(function, values)


def _fetch_runs(builder: Builder, runs: list[Value], num_bytes: Value) -> None:
    """Fetch runs of so many bytes that will be read."""

    def line(number: Value, _: list[Value]) -> list[Value]:
        for run in runs:
            _prefetch(builder, _at(builder, run, number, LINE_BYTES))
        return []

    _loop(builder, builder.udiv(num_bytes, INT64(LINE_BYTES)), [], line)


def _prefetch(builder: Builder, address: Value) -> None:
    """Fetch a line of the cache that will be read."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [_pointer(builder, address, INT8), INT32(0), INT32(3), INT32(1)])
