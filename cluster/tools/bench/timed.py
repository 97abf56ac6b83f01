"""A target and drafters that sleep for as long as computing would take.

What a step costs is then known to the millisecond, and whatever is slower than the sum of these
times is the way between them: engine, threads, messages. The tokens are not arbitrary: the one
after a token at a position is a function of both, so that an answer can be checked, and a draft
that was kept must have been right.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from cluster.interfaces import DraftQuery
from cluster.messages import Draft, SequenceRows, SequenceTokens, StepInput, StepOutput
from cluster.models.decoder import Segment
from cluster.models.kv_cache import KVCache
from cluster.models.spec import ModelSpec
from cluster.tools.bench.ideal import Roofline

VOCAB_SIZE = 4096
MASK = 2**64 - 1
MOST_OWED_SECONDS = 0.001  # what is slept beyond that is a machine that stood still


def mixed(*numbers: int) -> int:
    """64 bits that depend on every bit of the numbers (splitmix64's finisher, number by number)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ number) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def true_token(token_id: int, position: int) -> int:
    """What the target puts at a position after that token."""
    return mixed(token_id, position) % VOCAB_SIZE


class Acceptance(Protocol):
    """How likely the drafter is right; what it is told of is all it may depend on."""

    def probability(self, position: int) -> float:
        """Of the token for a position, its predecessors being right."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Right with the same probability everywhere, each time by itself."""

    rate: float

    def probability(self, position: int) -> float:
        """The rate."""
        del position
        return self.rate


@dataclass(frozen=True, slots=True)
class Regimes:
    """Stretches of `length` positions that are all easy or all hard, at random."""

    easy: float
    hard: float
    length: int = 32

    def probability(self, position: int) -> float:
        """That of the stretch."""
        return self.easy if mixed(position // self.length, 11) % 2 else self.hard


def drafted_token(token_id: int, position: int, acceptance: Acceptance) -> int:
    """The true token, or, as often as the drafter is wrong, another one."""
    right = true_token(token_id, position)
    draw = mixed(token_id, position, 23) / 2**64
    return right if draw < acceptance.probability(position) else (right + 1) % VOCAB_SIZE


class TimedWorker:
    """A `TargetWorker` that sleeps: put it behind a ThreadTarget.

    What it does itself counts towards its time.
    """

    def __init__(self, cost: Roofline) -> None:
        self.cost = cost
        self.num_steps = 0
        self.num_rows = 0
        self._sleeper = _Sleeper()

    def step(self, step: StepInput) -> StepOutput:
        """The true tokens after the rows, when their time is over."""
        start = time.perf_counter()
        num_rows = sum(len(sequence.token_ids) for sequence in step.sequences)
        self.num_steps += 1
        self.num_rows += num_rows
        answers = tuple(_verified(rows) for rows in step.sequences if rows.sampling is not None)
        self._sleeper.until(start + self.cost.seconds(num_rows))
        return StepOutput(step.step_id, answers)


def _verified(rows: SequenceRows) -> SequenceTokens:
    first = len(rows.token_ids) - rows.num_drafts - 1
    drawn: list[int] = []
    for place in range(first, len(rows.token_ids)):
        drawn.append(true_token(rows.token_ids[place], rows.start + place + 1))
        if place + 1 < len(rows.token_ids) and rows.token_ids[place + 1] != drawn[-1]:
            break
    return SequenceTokens(seq_id=rows.seq_id, num_accepted=len(drawn) - 1, token_ids=tuple(drawn))


class TimedDecoder:
    """What a DraftModel needs of a decoder: each forward pass with its logits takes its time.

    What is done between the beginning of the pass and its logits counts towards it. The margin of
    the logits is the log-odds of being right: the drafter knows its chances.
    """

    def __init__(
        self, cost: Roofline, acceptance: Acceptance, *, max_position_embeddings: int
    ) -> None:
        self.spec = smallest_spec(
            vocab_size=VOCAB_SIZE, max_position_embeddings=max_position_embeddings
        )
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self._cost = cost
        self._acceptance = acceptance
        self._end = 0.0  # of the pass under way
        self._sleeper = _Sleeper()

    def forward(self, token_ids: Tensor, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """`[num_tokens, 2]`: each row's token, and the position after it."""
        del cache
        self._end = time.perf_counter() + self._cost.seconds(len(token_ids))
        positions = [
            position + 1
            for segment in segments
            for position in range(segment.start, segment.start + segment.num_rows)
        ]
        return torch.stack([token_ids, torch.tensor(positions)], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]`, zero but for the drafted token's."""
        rows = hidden.tolist()
        drafted = [
            [drafted_token(token_id, position, self._acceptance)] for token_id, position in rows
        ]
        leads = [[_log_odds(self._acceptance.probability(position))] for _, position in rows]
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        logits.scatter_(1, torch.tensor(drafted), torch.tensor(leads))
        self._sleeper.until(self._end)
        return logits


class TimedDrafter:
    """A drafter without a tail: it begins when it is asked, and the engine waits for it.

    `cost` is that of one token of all sequences, `round_trip` is added once. Blocks nobody.
    """

    name = "timed"
    context_limit = None

    def __init__(self, cost: Roofline, acceptance: Acceptance, *, round_trip: float = 0.0) -> None:
        self._cost = cost
        self._acceptance = acceptance
        self._round_trip = round_trip
        self._sleeper = _Sleeper()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """All that is wanted, when its time is over."""
        end = time.perf_counter() + self._round_trip
        if queries:
            longest = max(query.num_wanted for query in queries)
            end += longest * self._cost.seconds(len(queries))
        drafts = {query.seq_id: self._draft(query) for query in queries}
        await asyncio.get_running_loop().run_in_executor(self._thread, self._sleeper.until, end)
        return drafts

    def release(self, seq_ids: Iterable[int]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """End the thread that waits."""
        self._thread.shutdown()

    def _draft(self, query: DraftQuery) -> Draft:
        token_ids: list[int] = []
        margins: list[float] = []
        last, position = query.token_ids[-1], len(query.token_ids)
        for _ in range(query.num_wanted):
            last = drafted_token(last, position, self._acceptance)
            token_ids.append(last)
            margins.append(_log_odds(self._acceptance.probability(position)))
            position += 1
        return Draft(tuple(token_ids), (), tuple(margins), self.name)


def _log_odds(probability: float) -> float:
    """What a sigmoid would turn back into the probability, between -8 and 8."""
    inside = min(max(probability, 1e-9), 1 - 1e-9)
    return min(max(log(inside / (1 - inside)), -8.0), 8.0)


class _Sleeper:
    """Sleeps; what the machine makes of a sleep beyond its end, the next one is shorter by."""

    def __init__(self) -> None:
        self._owed = 0.0

    def until(self, end: float) -> None:
        """Return at that moment of time.perf_counter, or at once if it is over."""
        end -= self._owed
        self._owed = 0.0
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
            self._owed = min(max(time.perf_counter() - end, 0.0), MOST_OWED_SECONDS)


def smallest_spec(*, vocab_size: int, max_position_embeddings: int) -> ModelSpec:
    """The smallest model there can be, for decoders that do not compute."""
    return ModelSpec(
        architecture="timed",
        vocab_size=vocab_size,
        hidden_size=2,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-6,
        rope_theta=1.0,
        rope_linear_factor=1.0,
        rope_scaling=None,
        sliding_windows=(None,),
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        tied_head=True,
    )
