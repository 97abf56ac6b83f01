"""The instructions that the kernels' innermost pieces are made of, in vectors of float32.

Each function adds some to what a builder of LLVM's makes. Addresses are in bytes, as integers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

Builder = Any  # llvmlite has no types
Value = Any

IS_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if IS_WIDE else 8
MOST_VECTORS = 16 if IS_WIDE else 8  # of all queries that are looked at together
MOST_HEADS = 4
LINE_BYTES = 64  # of a cache

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


def switch(builder: Builder, key: Value, cases: Mapping[int, Callable[[], None]]) -> None:
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


def by_size(
    builder: Builder, heads: Value, vectors: Value, generate: Callable[[int, int], None]
) -> None:
    """One case for each number of heads and of vectors that registers hold."""
    cases = {
        num_vectors * (MOST_HEADS + 1) + num_heads: partial(generate, num_heads, num_vectors)
        for num_vectors in range(1, MOST_VECTORS + 1)
        for num_heads in range(1, min(MOST_HEADS, MOST_VECTORS // num_vectors) + 1)
    }
    key = builder.add(builder.mul(vectors, INT64(MOST_HEADS + 1)), heads)
    switch(builder, key, cases)


def loop(
    builder: Builder,
    count: Value,
    values: list[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """Carry the values through `count` rounds, which may be none."""
    before = builder.block
    again, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, INT64(0)), again, done)
    builder.position_at_end(again)
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
    builder.cbranch(builder.icmp_signed("<", following, count), again, done)
    builder.position_at_end(done)
    results = [builder.phi(value.type) for value in values]
    for phi, value, result in zip(results, values, after, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(result, end)
    return results


def lanes_total(builder: Builder, vector: Value) -> Value:
    """All lanes together."""
    return folded(builder, vector, builder.fadd)


def folded(builder: Builder, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
    """All lanes in one: halves joined to one another time and again."""
    undefined, half = ir.Constant(VECTOR, ir.Undefined), LANES // 2
    while half:
        order = [(lane + half) % LANES for lane in range(LANES)]
        vector = join(vector, shuffled(builder, vector, undefined, order))
        half //= 2
    return builder.extract_element(vector, INT32(0))


def larger(builder: Builder, left: Value, right: Value) -> Value:
    """Lane by lane; the right one where one is no number."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def exp(builder: Builder, x: Value) -> Value:
    """Compute e to the x, a vector or a number, to some two units of the last place."""
    num_lanes = LANES if x.type == VECTOR else 0
    whole = ir.VectorType(INT32, LANES) if num_lanes else INT32

    def everywhere(kind: Any, number: float) -> Value:
        return ir.Constant(kind, [number] * num_lanes if num_lanes else number)

    number = partial(everywhere, x.type)
    x = larger(builder, x, number(LEAST_EXPONENT))
    is_more = builder.fcmp_ordered(">", x, number(MOST_EXPONENT))
    x = builder.select(is_more, number(MOST_EXPONENT), x)
    shifted = builder.fadd(builder.fmul(x, number(LOG2_E)), number(0.5))
    power = call(builder, "floor", shifted)
    minus = builder.fneg(power)
    rest = fma(builder, minus, number(LN2_LOW), fma(builder, minus, number(LN2_HIGH), x))
    polynomial = number(EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        polynomial = fma(builder, polynomial, rest, number(coefficient))
    square = builder.fmul(rest, rest)
    value = builder.fadd(fma(builder, polynomial, square, rest), number(1.0))
    exponent = builder.add(builder.fptosi(power, whole), everywhere(whole, 127))
    scale = builder.bitcast(builder.shl(exponent, everywhere(whole, 23)), x.type)
    return builder.fmul(value, scale)


def sums(builder: Builder, vectors: list[Value]) -> Value:
    """The sum over the lanes of each of LANES vectors; all are summed in the same order.

    Two vectors become one that has half as many sums of each, and so on; first within four lanes,
    where shuffling is cheap.
    """
    fours = range(0, LANES, 4)
    low = [lane for one in fours for lane in (one, LANES + one, one + 1, LANES + one + 1)]
    high = [lane + 2 for lane in low]
    even = [lane for one in range(0, 2 * LANES, 8) for lane in range(one, one + 4)]
    odd = [lane + 4 for lane in even]

    def joined(left: Value, right: Value, these: list[int], those: list[int]) -> Value:
        halves = [shuffled(builder, left, right, order) for order in (these, those)]
        return builder.fadd(*halves)

    totals = []
    for start in fours:
        first, second, third, fourth = vectors[start : start + 4]
        pair, other = joined(first, third, low, high), joined(second, fourth, low, high)
        totals.append(joined(pair, other, low, high))
    while len(totals) > 1:
        pairs = zip(totals[::2], totals[1::2], strict=True)
        totals = [joined(left, right, even, odd) for left, right in pairs]
    return totals[0]


def shuffled(builder: Builder, left: Value, right: Value, order: list[int]) -> Value:
    """Lanes of the two, counted through."""
    mask = ir.Constant(ir.VectorType(INT32, LANES), order)
    return builder.shuffle_vector(left, right, mask)


def at(builder: Builder, address: Value, index: Value, size: int) -> Value:
    """The address of an element of `size` bytes."""
    return builder.add(address, builder.mul(index, INT64(size)))


def pointer(builder: Builder, address: Value, kind: Any) -> Value:
    """An address as one of something."""
    return builder.inttoptr(address, ir.PointerType(kind))


def load(builder: Builder, address: Value, kind: Any, align: int = 4) -> Value:
    """What is at an address, aligned to so many bytes."""
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def place(builder: Builder, places: Value, index: Value) -> Value:
    """One of some addresses."""
    return load(builder, at(builder, places, index, 8), INT64, align=8)


def store(builder: Builder, value: Value, address: Value) -> None:
    """Put a vector or a number of float32."""
    builder.store(value, pointer(builder, address, value.type)).align = 4


def levels(builder: Builder, address: Value) -> Value:
    """A vector of int8 levels, as float32."""
    integers = load(builder, address, ir.VectorType(INT8, LANES), align=1)
    return builder.sitofp(builder.sext(integers, ir.VectorType(INT32, LANES)), VECTOR)


def spread(builder: Builder, number: Value) -> Value:
    """The number in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, number, INT32(0))
    return shuffled(builder, one, undefined, [0] * LANES)


def fma(builder: Builder, left: Value, right: Value, total: Value) -> Value:
    """Add left * right to total, vectors or numbers, rounded once."""
    return call(builder, "fma", left, right, total)


def call(builder: Builder, name: str, *values: Value) -> Value:
    """One of LLVM's own functions of float32, of vectors or numbers."""
    [kind] = {value.type for value in values}
    suffix = f"v{LANES}f32" if kind == VECTOR else "f32"
    declared = ir.FunctionType(kind, [kind] * len(values))
    function = cgutils.get_or_insert_function(builder.module, declared, f"llvm.{name}.{suffix}")
    return builder.call(function, values)


def fetch_runs(builder: Builder, runs: list[Value], num_bytes: Value) -> None:
    """Fetch runs of so many bytes that will be read."""

    def line(number: Value, _: list[Value]) -> list[Value]:
        for run in runs:
            prefetch(builder, at(builder, run, number, LINE_BYTES))
        return []

    loop(builder, builder.udiv(num_bytes, INT64(LINE_BYTES)), [], line)


def prefetch(builder: Builder, address: Value) -> None:
    """Fetch a line of the cache that will be read."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer(builder, address, INT8), INT32(0), INT32(3), INT32(1)])
