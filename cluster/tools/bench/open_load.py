"""Requests that come when they come, from a tenth of what the target can do to twice that.

The target is timed: memory-bound while few sequences run, compute-bound when all places are taken,
so that drafts pay at one end and cost at the other. The controller and an engine without drafts
get the same requests at the same moments, and sleep beside one another.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from cluster.control.adaptive import AdaptivePolicy
from cluster.control.policy import Candidate, FixedPolicy, Policy, StepRecord, StepShape
from cluster.drafters.silent import NoDrafter
from cluster.engine.engine import Engine
from cluster.interfaces import Drafter
from cluster.messages import Draft, TokenDelta
from cluster.tools.bench.decision import cost_of
from cluster.tools.bench.ideal import Roofline
from cluster.tools.bench.page import Lines, Section, Sheet
from cluster.tools.bench.progress import Report
from cluster.tools.bench.steady import is_true, timed_engine, timed_request
from cluster.tools.bench.timed import Regimes, TimedDrafter

LOADS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
MAX_NUM_SEQS = 16
NUM_TOKENS = (16, 64)  # of an answer, from and to
NUM_SPECULATIVE_TOKENS = 8
TARGET = Roofline(0.02, per_row=0.0015, ridge=8)
DRAFT = Roofline(0.0005)
ACCEPTANCE = Regimes(0.9, 0.3)
WINDOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one load: tokens delivered, the requests' times, and when the regime changed."""

    num_tokens: int
    seconds: float
    request_seconds: tuple[float, ...]  # of those that ended
    changes: tuple[float, ...] = ()

    @property
    def goodput(self) -> float:
        """Tokens delivered a second."""
        return self.num_tokens / self.seconds

    @property
    def mean_request_seconds(self) -> float:
        """From arrival to the last token."""
        return sum(self.request_seconds) / max(len(self.request_seconds), 1)

    @property
    def most_changes_a_second(self) -> int:
        """Changes of regime within any one second."""
        return max(
            (
                sum(start <= moment < start + WINDOW_SECONDS for moment in self.changes)
                for start in self.changes
            ),
            default=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One load: the controller beside no drafts."""

    load: float
    controller: Served
    off: Served

    @property
    def ratio(self) -> float:
        """The controller's goodput to that without drafts."""
        return self.controller.goodput / self.off.goodput

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "load": self.load,
            "goodput": self.controller.goodput,
            "off_goodput": self.off.goodput,
            "ratio_to_off": self.ratio,
            "mean_request_seconds": self.controller.mean_request_seconds,
            "off_mean_request_seconds": self.off.mean_request_seconds,
            "most_changes_of_regime_a_second": self.controller.most_changes_a_second,
        }


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Every load of a run."""

    rows: tuple[LoadRow, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [row.as_json() for row in self.rows]

    def __rich__(self) -> Table:
        title = "Open load on a timed target: the controller beside no drafts"
        table = Table(title=title, title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(*cells(row))
        return table

    def section(self) -> Section:
        """For a page."""
        series = {
            "controller": [(row.load, row.controller.goodput) for row in self.rows],
            "off": [(row.load, row.off.goodput) for row in self.rows],
        }
        times = {
            "controller": [(row.load, row.controller.mean_request_seconds) for row in self.rows],
            "off": [(row.load, row.off.mean_request_seconds) for row in self.rows],
        }
        x_label = "load, 1 being what the target can do without drafts"
        return Section(
            "Open load",
            "The same requests at the same moments, to a controller and to an engine without "
            "drafts, both on a timed target that is memory-bound when few sequences run and "
            "compute-bound when all do.",
            (Sheet(HEADINGS, [cells(row) for row in self.rows]),),
            (
                Lines("Goodput", x_label, "tokens/s", series),
                Lines("Mean time of a request", x_label, "s", times),
            ),
        )


HEADINGS = (
    "load",
    "tokens/s",
    "off",
    "to off",
    "request s",
    "off request s",
    "changes in a second, at most",
)


def cells(row: LoadRow) -> tuple[str, ...]:
    """A row of the table, under HEADINGS."""
    return (
        f"{row.load:g}",
        f"{row.controller.goodput:.1f}",
        f"{row.off.goodput:.1f}",
        f"{row.ratio:.2f}x",
        f"{row.controller.mean_request_seconds:.2f}",
        f"{row.off.mean_request_seconds:.2f}",
        str(row.controller.most_changes_a_second),
    )


def capacity() -> float:
    """Requests a second that the target can answer without drafts."""
    mean_tokens = sum(NUM_TOKENS) / 2
    return MAX_NUM_SEQS / TARGET.seconds(MAX_NUM_SEQS) / mean_tokens


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come."""

    arrives: float
    num_tokens: int


def arrivals(load: float, seconds: float, *, seed: int = 0) -> list[Planned]:
    """Requests of a Poisson process at that part of the capacity."""
    chances = random.Random(seed)
    planned: list[Planned] = []
    moment = chances.expovariate(load * capacity())
    while moment < seconds:
        planned.append(Planned(moment, chances.randint(*NUM_TOKENS)))
        moment += chances.expovariate(load * capacity())
    return planned or [Planned(0.0, NUM_TOKENS[0])]


async def bench_open_load(
    *, report: Report, loads: Sequence[float] = LOADS, seconds: float = 8.0
) -> LoadReport:
    """Serve every load twice, at the same time: whatever disturbs one disturbs both."""
    rows: list[LoadRow] = []
    for count, load in enumerate(loads):
        report("open load", count, len(loads))
        planned = arrivals(load, seconds)
        controller, off = await asyncio.gather(
            _with_controller(planned, seconds),
            _serve(planned, seconds, NoDrafter(), FixedPolicy(0)),
        )
        rows.append(LoadRow(load=load, controller=controller, off=off))
    report("open load", len(loads), len(loads))
    return LoadReport(tuple(rows))


async def _with_controller(planned: Sequence[Planned], seconds: float) -> Served:
    policy = AdaptivePolicy(
        cost_of(TARGET, MAX_NUM_SEQS), num_speculative_tokens=NUM_SPECULATIVE_TOKENS
    )
    watched = _Watched(policy)
    drafter = TimedDrafter(DRAFT, ACCEPTANCE)
    try:
        served = await _serve(planned, seconds, drafter, watched)
    finally:
        drafter.close()
    return replace(served, changes=tuple(watched.changes))


async def _serve(
    planned: Sequence[Planned], seconds: float, drafter: Drafter, policy: Policy
) -> Served:
    async with timed_engine(TARGET, drafter, policy, max_num_seqs=MAX_NUM_SEQS) as engine:
        return await _served(engine, planned, seconds)


async def _served(engine: Engine, planned: Sequence[Planned], seconds: float) -> Served:
    """Submit each request when it is due, and count what comes until the time is over.

    Raises ValueError when a token is not the target's.
    """
    start = time.perf_counter()
    answers: list[list[int]] = []
    times: list[float] = []
    requests = [
        timed_request(number, max_tokens=each.num_tokens) for number, each in enumerate(planned)
    ]
    for request, each in zip(requests, planned, strict=True):
        await asyncio.sleep(max(start + each.arrives - time.perf_counter(), 0))
        answers.append([])
        engine.submit(request, _emit(answers[-1], times))
    await asyncio.sleep(max(start + seconds - time.perf_counter(), 0))
    num_tokens = sum(map(len, answers))
    elapsed = time.perf_counter() - start
    ended = tuple(times)
    for request in requests:
        engine.abort(request.request_id)
    if not all(map(is_true, requests, answers)):
        raise ValueError("the engine delivered what the target never said")
    return Served(num_tokens, elapsed, ended)


def _emit(token_ids: list[int], times: list[float]) -> Callable[[TokenDelta], None]:
    """Takes one request's deltas from now on."""
    arrived = time.perf_counter()

    def emit(delta: TokenDelta) -> None:
        token_ids.extend(delta.token_ids)
        if delta.finish_reason is not None:
            times.append(time.perf_counter() - arrived)

    return emit


class _Watched:
    """A controller, and the moments at which it began or ended drafting as a whole."""

    def __init__(self, policy: AdaptivePolicy) -> None:
        self._policy = policy
        self._drafting = policy.drafting
        self.changes: list[float] = []

    @property
    def price(self) -> float:
        """The controller's."""
        return self._policy.price

    @property
    def price_floor(self) -> float:
        """The controller's."""
        return self._policy.price_floor

    @price_floor.setter
    def price_floor(self, floor: float) -> None:
        self._policy.price_floor = floor

    @property
    def patience_seconds(self) -> float:
        """The controller's."""
        return self._policy.patience_seconds

    def choose(self, candidates: Sequence[Candidate], shape: StepShape) -> Mapping[int, int]:
        """The controller's; a change is noted."""
        chosen = self._policy.choose(candidates, shape)
        if self._policy.drafting != self._drafting:
            self._drafting = self._policy.drafting
            self.changes.append(time.perf_counter())
        return chosen

    def admit(self, drafts: Mapping[int, Draft], shape: StepShape) -> Mapping[int, int]:
        """The controller's."""
        return self._policy.admit(drafts, shape)

    def observe(self, record: StepRecord) -> None:
        """The controller's."""
        self._policy.observe(record)

    def learn(self) -> None:
        """The controller's."""
        self._policy.learn()

    def forget(self, seq_ids: Sequence[int]) -> None:
        """The controller's."""
        self._policy.forget(seq_ids)
