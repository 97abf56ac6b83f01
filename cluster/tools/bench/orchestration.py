"""Part (a): what is lost between a target and its drafters, both of them timed."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, cast

from rich.table import Table

from cluster.control.policy import FixedPolicy
from cluster.drafters.model import DraftModel, ModelDrafter
from cluster.drafters.silent import NoDrafter
from cluster.interfaces import Drafter
from cluster.tools.bench.ideal import Roofline, Setting
from cluster.tools.bench.page import Lines, Section, Sheet
from cluster.tools.bench.progress import Report
from cluster.tools.bench.steady import MAX_MODEL_LEN, Steady, steady_rate, timed_engine
from cluster.tools.bench.timed import (
    VOCAB_SIZE,
    Constant,
    TimedDecoder,
    TimedDrafter,
)

if TYPE_CHECKING:
    from cluster.models.decoder import Decoder

STEP_SECONDS = (0.02, 0.04, 0.08)
WARM_UP_SECONDS = 0.5


class Way(StrEnum):
    """How drafts come to the engine."""

    OFF = "off"
    WAITING = "waiting"
    AHEAD = "ahead"  # in the engine's process
    WORKER = "worker"  # ahead, in a process of its own


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter, and what a call of it takes that does nothing."""

    drafter: Drafter
    round_trip: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestrationPlan:
    """Which step times, ways and settings are measured, and for how long each."""

    step_seconds: Sequence[float] = STEP_SECONDS
    ways: Sequence[Way] = tuple(Way)
    seconds: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestrationRow:
    """One way in one setting: what came a second and what could have come, by the closed form.

    Steps are compared, and not tokens: how many of them a step brings is the drafts' luck.
    """

    way: Way
    setting: Setting
    steady: Steady

    @property
    def ideal_rate(self) -> float:
        """Tokens per second."""
        return self.setting.rate(self.ideal_seconds)

    @property
    def ideal_seconds(self) -> float:
        """What a step should take."""
        if self.way in (Way.AHEAD, Way.WORKER):
            return self.setting.overlapped_seconds
        return self.setting.synchronous_seconds

    @property
    def efficiency(self) -> float:
        """What a step should take over what it took."""
        return self.ideal_seconds / self.steady.step_seconds

    @property
    def ratio_to_waiting(self) -> float:
        """What a step takes that waits for every draft, ideally, over what it took."""
        return self.setting.synchronous_seconds / self.steady.step_seconds

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "way": self.way.value,
            "step_seconds": self.setting.target_seconds,
            "num_sequences": self.setting.num_sequences,
            "num_speculative_tokens": self.setting.num_speculative_tokens,
            "acceptance": self.setting.acceptance,
            "draft_seconds": self.setting.draft_seconds,
            "round_trip_seconds": self.setting.round_trip,
            "steps_per_second": 1 / self.steady.step_seconds,
            "tokens_per_second": self.steady.rate,
            "ideal_tokens_per_second": self.ideal_rate,
            "efficiency": self.efficiency,
            "ratio_to_ideal_waiting": self.ratio_to_waiting,
        }


@dataclass(frozen=True, slots=True)
class OrchestrationReport:
    """Every row of a run."""

    rows: tuple[OrchestrationRow, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [row.as_json() for row in self.rows]

    def __rich__(self) -> Table:
        title = "Timed target and drafters: tokens per second and the closed-form ideal"
        table = Table(title=title, title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == "drafts" else "right")
        for row in self.rows:
            table.add_row(*cells(row))
        return table

    def section(self) -> Section:
        """For a page."""
        ways = {way: [row for row in self.rows if row.way is way] for way in Way}
        series = {
            f"{way.value}, K={number}": [
                (row.setting.target_seconds * 1000, row.efficiency)
                for row in rows
                if row.setting.num_speculative_tokens == number
            ]
            for way, rows in ways.items()
            for number in sorted({row.setting.num_speculative_tokens for row in rows})
        }
        title = "Achieved over the closed-form ideal"
        return Section(
            "Between target and drafters",
            "Target and drafters sleep for as long as computing would take, so that what is lost "
            "against the ideal is the way between them.",
            (Sheet(HEADINGS, [cells(row) for row in self.rows]),),
            (Lines(title, "ms of a step", "efficiency", series, reference=1.0),),
        )


HEADINGS = (
    "step ms",
    "at once",
    "K",
    "acceptance",
    "draft ms a token",
    "a call ms",
    "drafts",
    "tokens/s",
    "ideal",
    "efficiency",
    "to waiting",
)


def cells(row: OrchestrationRow) -> tuple[str, ...]:
    """A row for a table, under HEADINGS."""
    setting = row.setting
    return (
        f"{setting.target_seconds * 1000:g}",
        str(setting.num_sequences),
        str(setting.num_speculative_tokens),
        f"{setting.acceptance:g}",
        f"{setting.draft_seconds * 1000:g}",
        f"{setting.round_trip * 1000:.1f}",
        row.way.value,
        f"{row.steady.rate:.1f}",
        f"{row.ideal_rate:.1f}",
        f"{row.efficiency:.3f}",
        f"{row.ratio_to_waiting:.2f}x",
    )


def settings(step_seconds: float) -> tuple[Setting, ...]:
    """Drafts that are sometimes wrong, and drafts that are all right and take 0.8 of the step.

    The second is where drafting ahead could bring 1.8 times as much as waiting.
    """
    target = Roofline(step_seconds)
    return (
        Setting(
            num_sequences=8,
            num_speculative_tokens=4,
            acceptance=0.8,
            target=target,
            draft=Roofline(step_seconds / 20),
        ),
        Setting(
            num_sequences=4,
            num_speculative_tokens=8,
            acceptance=1.0,
            target=target,
            draft=Roofline(step_seconds / 10),
        ),
    )


async def bench_orchestration(plan: OrchestrationPlan, *, report: Report) -> OrchestrationReport:
    """Measure every way in every setting, one after another."""
    cases = [
        (way, replace(setting, num_speculative_tokens=0) if way is Way.OFF else setting)
        for step_seconds in plan.step_seconds
        for setting in settings(step_seconds)
        for way in plan.ways
    ]
    rows: list[OrchestrationRow] = []
    with _ray(plan.ways):
        for count, (way, setting) in enumerate(cases):
            report("timed parts", count, len(cases))
            async with WAYS[way](setting) as drafting:
                steady = await _steady(drafting.drafter, setting, plan.seconds)
            seen = replace(setting, round_trip=drafting.round_trip)
            rows.append(OrchestrationRow(way=way, setting=seen, steady=steady))
    report("timed parts", len(cases), len(cases))
    return OrchestrationReport(tuple(rows))


def _ray(ways: Sequence[Way]) -> AbstractContextManager[None]:
    """A Ray for as long as there is a use for one."""
    if Way.WORKER not in ways:
        return nullcontext()
    from cluster.actors.alone import lone_ray  # noqa: PLC0415 - Ray takes a second to load

    return lone_ray()


async def _steady(drafter: Drafter, setting: Setting, seconds: float) -> Steady:
    policy = FixedPolicy(setting.num_speculative_tokens)
    cost, num_sequences = setting.target, setting.num_sequences
    async with timed_engine(cost, drafter, policy, max_num_seqs=num_sequences) as engine:
        return await steady_rate(
            engine, num_sequences=num_sequences, warm_up=WARM_UP_SECONDS, seconds=seconds
        )


@asynccontextmanager
async def _off(setting: Setting) -> AsyncIterator[Drafting]:
    del setting
    yield Drafting(NoDrafter())


@asynccontextmanager
async def _waiting(setting: Setting) -> AsyncIterator[Drafting]:
    drafter = TimedDrafter(setting.draft, Constant(setting.acceptance))
    try:
        yield Drafting(drafter)
    finally:
        drafter.close()


@asynccontextmanager
async def _ahead(setting: Setting) -> AsyncIterator[Drafting]:
    drafter = ModelDrafter(timed_draft_model(setting), name="timed", run_ahead=True)
    try:
        yield Drafting(drafter)
    finally:
        drafter.close()


@asynccontextmanager
async def _in_worker(setting: Setting) -> AsyncIterator[Drafting]:
    from cluster.actors.alone import lone_draft_worker  # noqa: PLC0415 - as above

    make_model = partial(timed_draft_model, setting)
    async with lone_draft_worker(make_model, context_limit=MAX_MODEL_LEN) as worker:
        yield Drafting(worker.drafter, round_trip=worker.call_seconds)


WAYS: dict[Way, Callable[[Setting], AbstractAsyncContextManager[Drafting]]] = {
    Way.OFF: _off,
    Way.WAITING: _waiting,
    Way.AHEAD: _ahead,
    Way.WORKER: _in_worker,
}


def timed_draft_model(setting: Setting) -> DraftModel:
    """The real bookkeeping of a draft model on a decoder that sleeps."""
    decoder = TimedDecoder(
        setting.draft, Constant(setting.acceptance), max_position_embeddings=MAX_MODEL_LEN
    )
    return DraftModel(
        cast("Decoder", decoder),  # it has all that is asked of it
        num_blocks=setting.num_sequences,
        block_size=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
    )
