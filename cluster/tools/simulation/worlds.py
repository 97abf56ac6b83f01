"""Worlds to decide in: what steps really cost, and what drafts are really accepted."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.control.cost import CostTable
from cluster.control.policy import StepShape

FloatArray = NDArray[np.float64]

CONTEXT = 200  # tokens a sequence looks back on
MAX_ROWS = 1024
PROFILED_ROWS = sorted({n * r for n in (1, 2, 4, 8, 16, 32, 64) for r in (1, 2, 4, 9)})


def memory_bound(rows: FloatArray) -> FloatArray:
    """Weights are streamed, whatever is computed: rows are nearly free up to the ridge."""
    return np.maximum(20e-3 + 0.01e-3 * rows, 0.04e-3 * rows)


def compute_bound(rows: FloatArray) -> FloatArray:
    """Every row costs about as much as every other."""
    return 2e-3 + 1e-3 * rows


def staircase(rows: FloatArray) -> FloatArray:
    """Tiles of 16 rows: the first row of one pays for all of them."""
    return 10e-3 + 3e-3 * np.ceil(rows / 16)


def cpu_like(rows: FloatArray) -> FloatArray:
    """As measured on two cores with a model of 135M parameters: cheap at first, then linear."""
    knots, seconds = (1, 4, 8, 16, 640), (43e-3, 52e-3, 56e-3, 78e-3, 1.72)
    return np.asarray(np.interp(rows, knots, seconds), dtype=np.float64)


TABLES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "memory-bound": memory_bound,
    "compute-bound": compute_bound,
    "staircase": staircase,
    "cpu-like": cpu_like,
}


@dataclass(frozen=True, slots=True)
class Offer:
    """What could be drafted in a step: `[sequences, positions]`."""

    chances: FloatArray  # the true conditional acceptance
    margins: FloatArray  # what the drafter says of it

    @property
    def survivals(self) -> FloatArray:
        """The true ones."""
        return np.cumprod(self.chances, axis=1, dtype=np.float64)


class Process:
    """How drafts are accepted. The margins are all that is told of the chances.

    The same seed makes the same drafts, whatever is done with them.
    """

    name = "iid"

    def __init__(self, num_sequences: int, num_positions: int, *, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.shape = (num_sequences, num_positions)
        self.skill = self.random.normal(0.8, 1.0, size=(num_sequences, 1))
        self.step = 0

    def replace(self, index: int) -> None:
        """Another sequence in that place."""
        self.skill[index] = self.random.normal(0.8, 1.0)

    def next(self) -> Offer:
        """The next step's drafts."""
        self.step += 1
        logits, margins = self.logits()
        return Offer(1 / (1 + np.exp(-logits)), margins)

    def logits(self) -> tuple[FloatArray, FloatArray]:
        """Each sequence has a chance of its own; margins say nothing."""
        return np.broadcast_to(self.skill, self.shape), np.zeros(self.shape)


class Autocorrelated(Process):
    """Runs of easy and of hard tokens, which the drafter's margins tell apart."""

    name = "autocorrelated"

    def __init__(self, num_sequences: int, num_positions: int, *, seed: int) -> None:
        super().__init__(num_sequences, num_positions, seed=seed)
        self.ease = self.random.normal(size=(num_sequences, 1))

    def logits(self) -> tuple[FloatArray, FloatArray]:
        """Ease wanders from step to step; margins follow it, and differ from token to token."""
        self.ease = 0.95 * self.ease + math.sqrt(1 - 0.95**2) * self.random.normal(
            size=self.ease.shape
        )
        margins = self.random.gamma(2.0, np.exp(0.6 * self.ease), size=self.shape)
        return 0.7 * margins - 1.5 + 0.5 * self.skill, margins


class Decaying(Process):
    """The further in a draft, the less it is kept."""

    name = "decaying"

    def logits(self) -> tuple[FloatArray, FloatArray]:
        """Falls with the position; margins say nothing."""
        positions = np.arange(self.shape[1])
        return 1.2 + self.skill - 0.5 * positions, np.zeros(self.shape)


class Drifting(Process):
    """All chances rise and fall slowly together."""

    name = "drifting"

    def logits(self) -> tuple[FloatArray, FloatArray]:
        """A wave of 1,500 steps; margins say nothing."""
        wave = 2.0 * math.sin(2 * math.pi * self.step / 1500)
        return np.broadcast_to(0.5 * self.skill + wave, self.shape), np.zeros(self.shape)


class Hopeless(Process):
    """Nothing is ever kept."""

    name = "hopeless"

    def logits(self) -> tuple[FloatArray, FloatArray]:
        """One in a thousand; the drafter is as sure of itself as any."""
        return np.full(self.shape, -7.0), self.random.gamma(2.0, 2.0, size=self.shape)


PROCESSES: dict[str, type[Process]] = {
    process.name: process for process in (Process, Autocorrelated, Decaying, Drifting, Hopeless)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One cell: a cost table, a process, a batch size, and what waiting for drafts takes."""

    table: str
    process: str
    num_sequences: int
    num_positions: int = 8
    draft_seconds: float = 0.0  # of an exchange
    draft_token_seconds: float = 0.0  # of each position of all sequences together
    lifetime: int = 300  # steps until a sequence is followed by another
    noise: float = 0.05  # of the log of a step's seconds
    outliers: float = 0.01  # steps that take ten times as long
    seed: int = 0

    def seconds(self, num_rows: NDArray[np.int64] | int) -> FloatArray:
        """What a step of so many rows really takes, on average."""
        return TABLES[self.table](np.asarray(num_rows, dtype=np.float64))

    def waiting(self, depth: int) -> float:
        """What drafts of up to that depth really take."""
        return self.draft_seconds + self.draft_token_seconds * depth if depth else 0.0

    def profile(self) -> CostTable:
        """What a start-up profile would have measured, a few percent off."""
        random = np.random.default_rng(self.seed + 1)
        return CostTable(
            {
                self.shape(num_rows): float(self.seconds(num_rows))
                * math.exp(random.normal(0, 0.02))
                for num_rows in PROFILED_ROWS
            }
        )

    def shape(self, num_rows: int) -> StepShape:
        """The engine's view of a step of so many rows."""
        return StepShape(
            num_sequences=self.num_sequences,
            num_rows=num_rows,
            num_context_tokens=CONTEXT * self.num_sequences,
        )

    def offers(self) -> Process:
        """The drafts of all steps, from the first."""
        return PROCESSES[self.process](self.num_sequences, self.num_positions, seed=self.seed)
