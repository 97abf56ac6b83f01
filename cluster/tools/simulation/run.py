"""Runs policies in worlds, against the best that could be done there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cluster.control.adaptive import AdaptivePolicy
from cluster.control.batch_size import BatchSizePolicy
from cluster.control.policy import Candidate, FixedPolicy, Outcome, Policy, StepRecord
from cluster.control.tiered import TieredPolicy
from cluster.messages import Draft
from cluster.tools.simulation.worlds import CONTEXT, PROCESSES, TABLES, Offer, World

FloatArray = NDArray[np.float64]

NUM_STEPS = 1000
EARLY_STEPS = 200
WARM_STEPS = 400  # of which nothing is counted as warm
FIXED = (1, 2, 4, 8)
BATCH_SIZES = (1, 4, 16, 64)


class SimulatedClock:
    """The time in a world."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds since the world began."""
        return self.now


@dataclass(frozen=True, slots=True)
class Trace:
    """By step: expected tokens, mean seconds, draft rows, and whether drafting was on."""

    tokens: FloatArray
    seconds: FloatArray
    rows: FloatArray

    def goodput(self, first: int, last: int) -> float:
        """Tokens a second between two steps."""
        return float(self.tokens[first:last].sum() / self.seconds[first:last].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A world and what came of it: goodputs as parts of the optimum's, and how calm it was."""

    world: World
    early: float
    warm: float
    others: Mapping[str, float]  # the comparison policies, once warm
    mean_rows: float
    calibration_error: float


PolicyMaker = Callable[[World, SimulatedClock], Policy]


def adaptive(world: World, clock: SimulatedClock) -> AdaptivePolicy:
    """The policy under test, with a profile as from start-up."""
    return AdaptivePolicy(world.profile(), num_speculative_tokens=world.num_positions, clock=clock)


COMPARED: dict[str, PolicyMaker] = {
    "off": lambda *_: FixedPolicy(0),
    **{f"fixed {k}": lambda *_, k=k: FixedPolicy(k) for k in FIXED},
    "batch size": lambda *_: BatchSizePolicy(4, max_num_sequences=16),
    "tiers": lambda *_: TieredPolicy(),
}


def play(
    world: World, policy: Policy, clock: SimulatedClock, *, num_steps: int = NUM_STEPS
) -> Trace:
    """Let a policy decide every step. Tokens and seconds are expectations, without luck."""
    random = np.random.default_rng(world.seed + 2)
    offers = world.offers()
    count = world.num_sequences
    seq_ids = list(range(count))
    lengths = [CONTEXT] * count
    shape = world.shape(count)
    trace = Trace(np.zeros(num_steps), np.zeros(num_steps), np.zeros(num_steps))
    for step in range(num_steps):
        for index in _ending(world, step):
            policy.forget((seq_ids[index],))
            offers.replace(index)
            seq_ids[index] += count
            lengths[index] = CONTEXT
        offer = offers.next()
        candidates = [
            Candidate(seq_id=seq_id, num_tokens=length)
            for seq_id, length in zip(seq_ids, lengths, strict=True)
        ]
        asked = policy.choose(candidates, shape)
        waiting = world.waiting(max(asked.values(), default=0))
        clock.now += waiting
        drafts = _drafts(offer, seq_ids, asked)
        admitted = policy.admit(drafts, shape) if drafts else {}
        policy.learn()  # from the step before, as an engine has it
        counts = np.array([admitted.get(seq_id, 0) for seq_id in seq_ids])
        num_rows = int(counts.sum())
        mean_seconds = float(world.seconds(count + num_rows))
        seconds = mean_seconds * float(np.exp(random.normal(0, world.noise)))
        if random.random() < world.outliers:
            seconds *= 10
        clock.now += seconds
        luck = random.random(offer.chances.shape) < offer.chances
        accepted = np.minimum(np.cumprod(luck, axis=1).sum(axis=1), counts)
        policy.observe(
            StepRecord(
                shape=shape,
                outcomes=tuple(
                    Outcome(
                        seq_id=seq_id,
                        draft=drafts.get(seq_id, Draft()).first(int(counts[index])),
                        num_accepted=int(accepted[index]),
                    )
                    for index, seq_id in enumerate(seq_ids)
                ),
                draft_seconds=waiting * float(np.exp(random.normal(0, world.noise))),
                target_seconds=seconds,
            )
        )
        kept = np.arange(world.num_positions) < counts[:, None]
        trace.tokens[step] = count + float((offer.survivals * kept).sum())
        trace.seconds[step] = mean_seconds + waiting
        trace.rows[step] = num_rows
        lengths = [length + int(more) + 1 for length, more in zip(lengths, accepted, strict=True)]
    return trace


def optimum(world: World, *, num_steps: int = NUM_STEPS) -> tuple[Trace, Trace]:
    """The most that can be had by who knows all true chances and costs, drafting and plain.

    Every number of rows is tried at every step; the common worth of a second is the goodput that
    comes of it (found by iteration), which makes the whole the best.
    """
    offers = world.offers()
    count = world.num_sequences
    sums = np.zeros((num_steps, count * world.num_positions + 1))
    for step in range(num_steps):
        for index in _ending(world, step):
            offers.replace(index)
        sums[step, 1:] = np.cumsum(-np.sort(-offers.next().survivals.ravel()))
    costs = world.seconds(count + np.arange(sums.shape[1]))
    waiting = world.waiting(world.num_positions)
    goodput = count / costs[0]
    chosen = np.zeros(num_steps, dtype=np.int64)
    for _ in range(20):
        chosen = np.argmax(sums - goodput * costs, axis=1)
        tokens = count + sums[np.arange(num_steps), chosen]
        seconds = costs[chosen] + waiting
        goodput = tokens.sum() / seconds.sum()
    plain = Trace(
        np.full(num_steps, float(count)), np.full(num_steps, costs[0]), np.zeros(num_steps)
    )
    return Trace(tokens, seconds, chosen.astype(np.float64)), plain


def compare(world: World, *, num_steps: int = NUM_STEPS) -> Cell:
    """The policy and all it is compared with, in one world."""
    best = optimum(world, num_steps=num_steps)

    def part(trace: Trace, first: int, last: int) -> float:
        return trace.goodput(first, last) / max(each.goodput(first, last) for each in best)

    clock = SimulatedClock()
    policy = adaptive(world, clock)
    trace = play(world, policy, clock, num_steps=num_steps)
    others = {
        name: part(
            play(world, make(world, (own := SimulatedClock())), own, num_steps=num_steps),
            WARM_STEPS,
            num_steps,
        )
        for name, make in COMPARED.items()
    }
    return Cell(
        world=world,
        early=part(trace, 0, EARLY_STEPS),
        warm=part(trace, WARM_STEPS, num_steps),
        others=others,
        mean_rows=float(trace.rows[WARM_STEPS:].mean()) / world.num_sequences,
        calibration_error=policy.calibration_error,
    )


def worlds(*, seed: int = 0) -> list[World]:
    """Every table with every process and batch size; drafts cost nothing to make."""
    return [
        World(table=table, process=process, num_sequences=num_sequences, seed=seed)
        for table, process, num_sequences in product(TABLES, PROCESSES, BATCH_SIZES)
    ]


def _ending(world: World, step: int) -> list[int]:
    """Which places change hands, spread over the lifetime."""
    return [
        index
        for index in range(world.num_sequences)
        if step and (step + index * 37) % world.lifetime == 0
    ]


def _drafts(offer: Offer, seq_ids: list[int], asked: Mapping[int, int]) -> dict[int, Draft]:
    drafts = {}
    for index, seq_id in enumerate(seq_ids):
        if count := asked.get(seq_id, 0):
            drafts[seq_id] = Draft(
                (0,) * count, margins=tuple(offer.margins[index, :count].tolist()), drafter="draft"
            )
    return drafts
