"""Part (c): the controller on the real model, beside no drafts and beside every fixed K.

All engines of a cell answer the same prompts with the same seeds, wave by wave in turn, as in
`bench engine`. The controller is one engine through all cells: what it learned of one workload it
brings along to the next, as a server would. Before the first cell every engine answers some mixed
prompts that are not counted.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, cast

from rich.table import Table

from cluster.config import DType, TargetConfig
from cluster.models.load import load_spec
from cluster.models.reference import resolve
from cluster.text.tokenizer import load_tokenizer
from cluster.tools.bench.engine import EnginePlan, Run, in_turn, target_config
from cluster.tools.bench.figures import Rounds, Wave
from cluster.tools.bench.lanes import Lab, Variant, open_lab
from cluster.tools.bench.page import Bars, Section, Sheet
from cluster.tools.bench.progress import Report
from cluster.tools.bench.workloads import Workload, parse_workload

if TYPE_CHECKING:
    from cluster.control.adaptive import AdaptivePolicy

RANDOM, MIXED = "random", "mixed"
WORKLOADS = ("copy", "code", "chat", RANDOM, MIXED)
CONCURRENCIES = (1, 4, 8, 16)
FIXED = (1, 2, 4, 8)
RANDOM_PROMPT_TOKENS = 64

Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPlan:
    """The cells: every draft with every workload at every concurrency."""

    target: str
    drafts: Sequence[str] = ("ngram",)
    workloads: Sequence[str] = WORKLOADS
    concurrencies: Sequence[int] = CONCURRENCIES
    fixed: Sequence[int] = FIXED
    dtype: DType = "float32"
    num_prompts: int = 8
    max_tokens: int = 64
    temperature: float = 0.0
    rounds: int = 3

    def variants(self, draft: str) -> tuple[Variant, ...]:
        """Off, the controller, and every fixed K; the controller may go as far as the furthest."""
        return (
            Variant(self.dtype),
            Variant(self.dtype, draft, max(self.fixed), controlled=True),
            *(Variant(self.dtype, draft, number) for number in self.fixed),
        )

    def engine_plan(self, workload: str) -> EnginePlan:
        """One workload's cells as `bench engine` would have them; only its name counts."""
        return EnginePlan(
            target=self.target,
            workload=Workload(workload, ()),
            concurrencies=self.concurrencies,
            num_speculative_tokens=self.fixed,
            dtypes=(self.dtype,),
            num_prompts=self.num_prompts,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=True,
            rounds=self.rounds,
        )

    @property
    def most_prompts(self) -> int:
        """Of any cell."""
        plan = self.engine_plan("")
        return max(map(plan.num_asked, self.concurrencies))


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCell:
    """One workload at one concurrency: what each engine brought."""

    workload: str
    draft: str
    concurrency: int
    off: Rounds
    controller: Rounds
    fixed: dict[int, Rounds]
    calibration_error: float  # after the cell, of all that the controller has seen verified,
    num_calibrated: float  # so many positions

    @property
    def best_fixed(self) -> int:
        """The K that brought most here, which nobody knows beforehand."""
        return max(self.fixed, key=lambda number: self.fixed[number].goodput)

    @property
    def ratio_to_off(self) -> float:
        """The controller's goodput to that without drafts."""
        return ratio(self.controller, self.off)

    @property
    def ratio_to_best_fixed(self) -> float:
        """The controller's goodput to that of the best fixed K."""
        return ratio(self.controller, self.fixed[self.best_fixed])

    @property
    def ratio_to_best(self) -> float:
        """The controller's goodput to the better of no drafts and the best fixed K."""
        return min(self.ratio_to_off, self.ratio_to_best_fixed)

    @property
    def same_tokens(self) -> bool:
        """Whether all engines gave the same answers."""
        others = (self.controller, *self.fixed.values())
        return all(each.answers == self.off.answers for each in others)

    def as_json(self) -> dict[str, object]:
        """Plain data; ratios above 1 are faster."""
        return {
            "workload": self.workload,
            "draft": self.draft,
            "concurrency": self.concurrency,
            "off_tokens_per_second": self.off.goodput,
            "controller_tokens_per_second": self.controller.goodput,
            "fixed_tokens_per_second": {str(k): each.goodput for k, each in self.fixed.items()},
            "best_fixed": self.best_fixed,
            "ratio_to_off": self.ratio_to_off,
            "ratio_to_best_fixed": self.ratio_to_best_fixed,
            "ratio_to_best": self.ratio_to_best,
            "acceptance_length": self.controller.acceptance_length,
            "same_tokens": self.same_tokens,
            "calibration_error": self.calibration_error,
            "verified_positions": self.num_calibrated,
        }


def ratio(rounds: Rounds, others: Rounds) -> float:
    """The median of the waves' ratios: both of a ratio were taken within seconds of each other.

    Nothing but the time counts in which all requests of a wave were under way; where they never
    were, in one of the two, both are taken whole.
    """
    return median(
        _wave_ratio(own, other) for own, other in zip(rounds.waves, others.waves, strict=True)
    )


def _wave_ratio(own: Wave, other: Wave) -> float:
    (tokens, seconds), (other_tokens, other_seconds) = own.together, other.together
    if not (tokens and other_tokens):
        tokens, seconds = own.num_tokens, own.seconds
        other_tokens, other_seconds = other.num_tokens, other.seconds
    return (tokens / seconds) / (other_tokens / other_seconds)


@dataclass(frozen=True, slots=True)
class RealReport:
    """Every cell of a run."""

    cells: tuple[RealCell, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [cell.as_json() for cell in self.cells]

    def __rich__(self) -> Table:
        title = "Tokens per second on the real model: the controller, no drafts, and fixed K"
        table = Table(title=title, title_justify="left")
        for heading in self._headings:
            table.add_column(heading, justify="left" if heading in TEXTS else "right")
        for cell in self.cells:
            table.add_row(*cells(cell))
        return table

    def section(self) -> Section:
        """For a page."""
        pictures = [
            Bars(
                f"{draft}: the controller's goodput",
                "to the better of off and the best fixed K",
                {
                    workload: {
                        f"{cell.concurrency} at once": cell.ratio_to_best
                        for cell in self.cells
                        if (cell.draft, cell.workload) == (draft, workload)
                    }
                    for workload in dict.fromkeys(cell.workload for cell in self.cells)
                },
                reference=1.0,
            )
            for draft in dict.fromkeys(cell.draft for cell in self.cells)
        ]
        return Section(
            "The real model",
            "All engines of a row answered the same prompts with the same seeds, in turn, wave by "
            "wave. Tokens count while all requests of a wave are under way, after the prompts. "
            "Ratios are medians over the waves.",
            (Sheet(self._headings, [cells(cell) for cell in self.cells]),),
            pictures,
        )

    @property
    def _headings(self) -> tuple[str, ...]:
        fixed = [f"K={number}" for number in self.cells[0].fixed]
        ratios = ("to off", "to best fixed", "to best")
        others = ("tokens a step", "same tokens", "calibration error", "positions")
        return ("drafts", "workload", "at once", "controller", "off", *fixed, *ratios, *others)


TEXTS = ("drafts", "workload")


def cells(cell: RealCell) -> tuple[str, ...]:
    """A row of the table."""
    return (
        cell.draft,
        cell.workload,
        str(cell.concurrency),
        f"{cell.controller.goodput:.1f}",
        f"{cell.off.goodput:.1f}",
        *(f"{each.goodput:.1f}" for each in cell.fixed.values()),
        f"{cell.ratio_to_off:.2f}x",
        f"{cell.ratio_to_best_fixed:.2f}x",
        f"{cell.ratio_to_best:.2f}x",
        f"{cell.controller.acceptance_length:.2f}",
        "yes" if cell.same_tokens else "no",
        f"{cell.calibration_error:.3f}",
        f"{cell.num_calibrated:.0f}",
    )


async def bench_real(plan: RealPlan, *, report: Report) -> RealReport:
    """Measure every cell. Raises ConfigurationError."""
    prompts = {workload: prompts_of(workload, plan) for workload in (*plan.workloads, MIXED)}
    config = _target_config(plan, prompts)
    found: list[RealCell] = []
    async with open_lab(config) as lab:
        for draft in plan.drafts:
            found += await _cells(plan, lab, draft, prompts, report)
    return RealReport(tuple(found))


def _target_config(plan: RealPlan, prompts: dict[str, Prompts]) -> TargetConfig:
    """A target just large enough for all workloads. Raises ConfigurationError."""
    everything = list(chain.from_iterable(prompts.values()))
    return target_config(plan.engine_plan("all"), everything)


async def _cells(
    plan: RealPlan, lab: Lab, draft: str, prompts: dict[str, Prompts], report: Report
) -> list[RealCell]:
    """All cells of one drafter; its engines live through all of them."""
    off, controller, *fixed = variants = plan.variants(draft)
    found: list[RealCell] = []
    async with AsyncExitStack() as stack:
        lanes = {
            variant: await stack.enter_async_context(lab.lane(variant)) for variant in variants
        }
        runs: dict[Variant, Run] = {variant: lane.run for variant, lane in lanes.items()}
        policy = cast("AdaptivePolicy", lanes[controller].policy)
        await _warm_up(plan, runs)
        for workload, concurrency in (
            (workload, concurrency)
            for workload in plan.workloads
            for concurrency in plan.concurrencies
        ):
            engine_plan = plan.engine_plan(f"{draft}, {workload}")
            asked = prompts[workload][: engine_plan.num_asked(concurrency)]
            rounds = await in_turn(engine_plan, runs, asked, concurrency, report)
            found.append(
                RealCell(
                    workload=workload,
                    draft=draft,
                    concurrency=concurrency,
                    off=rounds[off],
                    controller=rounds[controller],
                    fixed={each.num_speculative_tokens or 0: rounds[each] for each in fixed},
                    calibration_error=policy.calibration_error,
                    num_calibrated=policy.num_calibrated,
                )
            )
    return found


async def _warm_up(plan: RealPlan, runs: Mapping[Variant, Run]) -> None:
    """Let every engine answer a wave of all kinds."""
    engine_plan = plan.engine_plan(MIXED)
    prompts = prompts_of(MIXED, plan)[: max(plan.concurrencies)]
    for run in runs.values():
        await run(engine_plan.wave(prompts, first=0, salt="warm-up"))


def prompts_of(workload: str, plan: RealPlan) -> Prompts:
    """As many prompts as the largest cell takes. Raises ConfigurationError."""
    count = plan.most_prompts
    if workload == RANDOM:
        return _random_prompts(count, load_spec(resolve(plan.target)).vocab_size)
    if workload == MIXED:
        kinds = (prompts_of(kind, plan) for kind in WORKLOADS if kind != MIXED)
        return list(chain.from_iterable(zip(*kinds, strict=True)))[:count]
    return parse_workload(workload).token_ids(load_tokenizer(resolve(plan.target)), count)


def _random_prompts(count: int, vocab_size: int) -> Prompts:
    """Tokens that follow from nothing; what the model makes of them is hard to guess, too."""
    chances = random.Random(0)
    return [
        tuple(chances.randrange(vocab_size) for _ in range(RANDOM_PROMPT_TOKENS))
        for _ in range(count)
    ]
