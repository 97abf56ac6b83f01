"""What a step of the target costs on this machine, measured before anything is served.

Keys and values are noise: a step takes as long on them as on any text, and no prompt has to be
computed first. The blocks are the target's own, which nobody uses yet; what is left in them is
overwritten before anyone reads it.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.control.cost import CostTable
from cluster.control.policy import StepShape
from cluster.messages import SamplingSpec, SequenceRows, StepInput, StepOutput
from cluster.processor import Processor

BUDGET_SECONDS = 4.0
MAX_REPEATS = 7
CONTEXTS = (64, 1024)  # tokens, where the model has room for them
SPREAD = 64  # neighbours' contexts differ by this much: attention takes equal ones together
NUM_SPREAD = 4
NUM_CORNERS = 4  # of the grid of shapes, which are timed whatever it takes


class Cache(Protocol):
    """The KV memory of whoever computes."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        ...

    @property
    def block_size(self) -> int:
        """Positions in one."""
        ...

    def write_noise(self, block_table: Sequence[int], num_tokens: int) -> None:
        """Have keys and values at the first positions."""
        ...


class Timeable(Protocol):
    """What steps can be timed on: a worker, or a group of them."""

    @property
    def cache(self) -> Cache:
        """Its KV memory."""
        ...

    @property
    def processor(self) -> Processor:
        """What computes."""
        ...

    def step(self, step: StepInput) -> StepOutput:
        """Compute a step, and return when it is done."""
        ...


@dataclass(frozen=True, slots=True)
class ProfiledShape:
    """So many sequences with so many rows each, after contexts of about so many tokens."""

    num_sequences: int
    rows_each: int
    context: int

    def contexts(self, room: int) -> list[int]:
        """Every sequence's own, none above `room`."""
        spread = (SPREAD * (number % NUM_SPREAD) for number in range(self.num_sequences))
        return [min(self.context + more, room) for more in spread]

    def step_shape(self, room: int) -> StepShape:
        """The shape in the policy's words, the drafts being among its rows."""
        return StepShape(
            num_sequences=self.num_sequences,
            num_rows=self.num_sequences * self.rows_each,
            num_context_tokens=sum(self.contexts(room)) + self.num_sequences,
        )


def profile_steps(
    worker: Timeable,
    *,
    max_num_seqs: int,
    max_num_speculative_tokens: int,
    max_model_len: int,
    budget_seconds: float = BUDGET_SECONDS,
) -> CostTable:
    """Time the steps that occur: 1..max_num_seqs sequences of 1..K+1 rows, at two contexts.

    Every shape is timed once, then all of them again until `budget_seconds` are over. Call it in
    the thread that will compute, before the first request.
    """
    return CostTable(
        measure_points(
            worker,
            max_num_seqs=max_num_seqs,
            max_num_speculative_tokens=max_num_speculative_tokens,
            max_model_len=max_model_len,
            budget_seconds=budget_seconds,
        )
    )


def measure_points(
    worker: Timeable,
    *,
    max_num_seqs: int,
    max_num_speculative_tokens: int,
    max_model_len: int,
    budget_seconds: float = BUDGET_SECONDS,
) -> dict[StepShape, float]:
    """Seconds by shape, the corners of the grid first; at least those are there."""
    room = max_model_len - max_num_speculative_tokens - 1
    shapes = profiled_shapes(max_num_seqs, max_num_speculative_tokens, room)
    bench = _Bench(worker, room)
    bench.fill(shapes)
    times: dict[ProfiledShape, list[float]] = defaultdict(list)
    end = time.perf_counter() + budget_seconds
    for repeat in range(MAX_REPEATS):
        for count, shape in enumerate(shapes):
            if time.perf_counter() > end and (repeat or count >= NUM_CORNERS):
                return _points(times, room)
            times[shape].append(bench.timed(shape))
    return _points(times, room)


def profiled_shapes(
    max_num_seqs: int, max_num_speculative_tokens: int, room: int
) -> list[ProfiledShape]:
    """What is timed, the most telling first. `room` is the longest context before a step."""
    most_rows = max_num_speculative_tokens + 1
    near, far = (min(context, room) for context in CONTEXTS)
    sequences = sorted({*(4**power for power in range(6) if 4**power < max_num_seqs), max_num_seqs})
    rows = sorted({1, 2, 4, most_rows} & set(range(1, most_rows + 1)))
    corners = [
        ProfiledShape(num_sequences, rows_each, near)
        for num_sequences in (1, max_num_seqs)
        for rows_each in (1, most_rows)
    ]
    inner = [
        ProfiledShape(num_sequences, rows_each, near)
        for num_sequences in sequences
        for rows_each in rows
    ]
    distant = [
        ProfiledShape(num_sequences, rows_each, far)
        for num_sequences in sequences
        for rows_each in (1, most_rows)
    ]
    return list(dict.fromkeys((*corners, *inner, *distant)))


class _Bench:
    """Steps of given shapes on a target's own blocks; sequences share them where there are few."""

    def __init__(self, worker: Timeable, room: int) -> None:
        self._worker = worker
        self._room = room
        cache = worker.cache
        self._blocks_each = -(-(room + 1) // cache.block_size)

    def fill(self, shapes: Iterable[ProfiledShape]) -> None:
        """Have keys and values wherever the shapes will look."""
        longest: dict[int, int] = defaultdict(int)
        for shape in shapes:
            for number, context in enumerate(shape.contexts(self._room)):
                longest[number] = max(longest[number], context)
        for number, context in longest.items():
            self._worker.cache.write_noise(self._table(number), context)

    def timed(self, shape: ProfiledShape) -> float:
        """Seconds of one greedy step."""
        sequences = tuple(
            SequenceRows(
                seq_id=number,
                block_table=self._table(number),
                start=context,
                token_ids=tuple(range(shape.rows_each)),
                num_drafts=shape.rows_each - 1,
                sampling=SamplingSpec(seed=0, temperature=0.0),
            )
            for number, context in enumerate(shape.contexts(self._room))
        )
        start = time.perf_counter()
        self._worker.step(StepInput(0, sequences))
        return time.perf_counter() - start

    def _table(self, number: int) -> tuple[int, ...]:
        cache, size = self._worker.cache, self._blocks_each
        first = number * size
        return tuple(block % cache.num_blocks for block in range(first, first + size))


def _points(times: Mapping[ProfiledShape, Sequence[float]], room: int) -> dict[StepShape, float]:
    """The lower quartile of each shape: what disturbs a step only ever makes it longer.

    The first time of a shape, which makes its kernels, counts only if there is no other.
    """
    points = {}
    for shape, (first, *others) in times.items():
        ordered = sorted(others or (first,))
        points[shape.step_shape(room)] = ordered[len(ordered) // 4]
    return points
