"""What a decision of the controller costs: one `choose` and one `admit`, no engine around them."""

import random
import time
from dataclasses import dataclass

from rich.table import Table

from cluster.control.adaptive import AdaptivePolicy
from cluster.control.cost import CostTable
from cluster.control.policy import Candidate, Outcome, Policy, StepRecord, StepShape
from cluster.messages import Draft
from cluster.tools.bench.figures import percentile
from cluster.tools.bench.ideal import Roofline
from cluster.tools.bench.page import Section, Sheet
from cluster.tools.bench.progress import Report

NUM_SEQUENCES = 64
NUM_POSITIONS = 8
NUM_STEPS = 1000
WARM_UP_STEPS = 200
CONTEXT = 256
ACCEPTANCE = 0.8
COST = Roofline(0.02, per_row=0.00005, ridge=128)
TARGET_SECONDS = 0.0003


@dataclass(frozen=True, slots=True)
class DecisionReport:
    """Seconds of every decision, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of all."""
        return percentile(self.seconds, 50)

    def as_json(self) -> dict[str, object]:
        """Plain data, in seconds."""
        return {
            "num_sequences": NUM_SEQUENCES,
            "num_positions": NUM_POSITIONS,
            "p50_seconds": self.median,
            "p99_seconds": percentile(self.seconds, 99),
            "target_seconds": TARGET_SECONDS,
        }

    def __rich__(self) -> Table:
        table = Table(title="Milliseconds of a decision", title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        table.add_row(*cells(self))
        return table

    def section(self) -> Section:
        """For a page."""
        return Section(
            "The decision",
            f"Milliseconds of one choose and one admit for {NUM_SEQUENCES} sequences of "
            f"{NUM_POSITIONS} positions.",
            (Sheet(HEADINGS, [cells(self)]),),
        )


HEADINGS = ("sequences", "positions each", "p50", "p99", "target")


def cells(report: DecisionReport) -> tuple[str, ...]:
    """The row of the table, under HEADINGS."""
    values = (report.median, percentile(report.seconds, 99), TARGET_SECONDS)
    sizes = (str(NUM_SEQUENCES), str(NUM_POSITIONS))
    return (*sizes, *(f"{value * 1000:.3f}" for value in values))


def bench_decision(*, report: Report, num_steps: int = NUM_STEPS) -> DecisionReport:
    """Decide many times, learning in between, as an engine would have it."""
    policy = AdaptivePolicy(cost_of(COST, NUM_SEQUENCES), num_speculative_tokens=NUM_POSITIONS)
    chances = random.Random(0)
    seconds: list[float] = []
    for step in range(WARM_UP_STEPS + num_steps):
        if step % 100 == 0:
            report("decisions", step, WARM_UP_STEPS + num_steps)
        seconds.append(_timed_step(policy, step, chances))
    report("decisions", WARM_UP_STEPS + num_steps, WARM_UP_STEPS + num_steps)
    return DecisionReport(tuple(seconds[WARM_UP_STEPS:]))


def cost_of(cost: Roofline, num_sequences: int) -> CostTable:
    """The table that a profile of such a target would bring."""
    rows = sorted({*range(1, 17), *range(16, 16 * num_sequences + 1, 16)})
    return CostTable(
        {
            StepShape(num_sequences=1, num_rows=each, num_context_tokens=1): cost.seconds(each)
            for each in rows
        }
    )


def _timed_step(policy: Policy, step: int, chances: random.Random) -> float:
    """Seconds of the two decisions of a step; then the policy is told what came of it."""
    candidates = [
        Candidate(seq_id=seq_id, num_tokens=CONTEXT + step) for seq_id in range(NUM_SEQUENCES)
    ]
    shape = StepShape(
        num_sequences=NUM_SEQUENCES,
        num_rows=NUM_SEQUENCES,
        num_context_tokens=NUM_SEQUENCES * (CONTEXT + step),
    )
    start = time.perf_counter()
    chosen = policy.choose(candidates, shape)
    middle = time.perf_counter()
    drafts = {seq_id: _draft(count, chances) for seq_id, count in chosen.items() if count}
    again = time.perf_counter()
    admitted = policy.admit(drafts, shape)
    seconds = middle - start + time.perf_counter() - again
    taken = {seq_id: draft.first(admitted.get(seq_id, 0)) for seq_id, draft in drafts.items()}
    outcomes = tuple(
        Outcome(seq_id=seq_id, draft=draft, num_accepted=_num_accepted(draft, chances))
        for seq_id, draft in taken.items()
    )
    num_rows = shape.num_rows + sum(len(draft.token_ids) for draft in taken.values())
    policy.observe(
        StepRecord(
            shape=shape,
            outcomes=outcomes,
            draft_seconds=0.0001,
            target_seconds=COST.seconds(num_rows),
        )
    )
    policy.learn()
    return seconds


def _draft(count: int, chances: random.Random) -> Draft:
    margins = tuple(chances.uniform(0, 4) for _ in range(count))
    return Draft(tuple(range(count)), (), margins, "timed")


def _num_accepted(draft: Draft, chances: random.Random) -> int:
    accepted = 0
    while accepted < len(draft.token_ids) and chances.random() < ACCEPTANCE:
        accepted += 1
    return accepted
