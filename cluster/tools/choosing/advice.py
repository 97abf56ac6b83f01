"""From what is known to what to do: whether to speculate, how deep, where to draft, and why.

Each answer follows from the same arithmetic: what the target's time of a request would be with
one thing changed. There is no threshold on acceptance or load.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from rich.table import Table

from cluster.tools.choosing.facts import DrafterFacts, Facts, Place, StepCosts
from cluster.tools.choosing.findings import (
    MILLI,
    Finding,
    Topic,
    around,
    is_tight,
    takes_memory,
)
from cluster.tools.choosing.gains import (
    Gain,
    needed_acceptance,
    pays_up_to,
)
from cluster.tools.choosing.obstacles import WORTH, Case, Cause, obstacle

BUSY_WORKER = 0.7  # of its time: beyond it drafts begin to wait for one another
UNKNOWN = DrafterFacts(name="ngram")


class Answer(StrEnum):
    """Whether to speculate."""

    YES = "yes"
    NO = "no"
    TRY = "try"  # nothing is known of any drafts here
    UNKNOWN = "unknown"  # nothing is known of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do; `drafter` is the one to take, `num_workers` of its pool in the whole cluster."""

    answer: Answer
    cause: Cause | None = None
    drafter: str | None = None
    depth: int = 0
    speedup: float = 1.0
    place: Place | None = None
    num_workers: int = 0
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)

    def __rich__(self) -> Table:
        table = Table(
            title=f"Speculate: {self.answer}", title_justify="left", show_header=False, width=110
        )
        for finding in self.findings:
            table.add_row(finding.topic.value, f"{finding.says}\n[dim]{finding.because}[/dim]")
        return table


def advise(facts: Facts) -> Advice:
    """What to do about drafts."""
    if facts.costs is None:
        return Advice(
            answer=Answer.UNKNOWN,
            findings=(
                Finding(
                    Topic.SPECULATE,
                    "Nobody can say yet.",
                    "No step of the target was timed: send it requests, or run "
                    "`drafthouse profile`.",
                ),
                *around(facts),
            ),
        )
    case = _chosen(facts, facts.costs)
    if not case.drafter.survival:
        return _trial(case)
    gain = case.gain
    if gain.speedup >= WORTH:
        return _yes(case, gain)
    return _no(case)


def _chosen(facts: Facts, costs: StepCosts) -> Case:
    """The drafter that brings most; where memory is tight one that takes none, if that pays."""
    number = max(facts.running or 1.0, 1.0)
    cases = [Case(facts, costs, each, number) for each in facts.drafters or (UNKNOWN,)]
    if is_tight(facts):
        light = [
            case for case in cases if not takes_memory(case.drafter) and case.gain.speedup >= WORTH
        ]
        cases = light or cases
    return max(cases, key=lambda case: (bool(case.drafter.survival), case.gain.speedup))


def _yes(case: Case, gain: Gain) -> Advice:
    facts, drafter = case.facts, case.drafter
    place, num_workers = _place(case), _num_workers(case)
    most = pays_up_to(facts, case.costs, drafter, worth=WORTH)
    share = drafter.survival[gain.depth - 1]
    return Advice(
        answer=Answer.YES,
        drafter=drafter.name,
        depth=gain.depth,
        speedup=gain.speedup,
        place=place,
        num_workers=num_workers,
        findings=(
            Finding(
                Topic.SPECULATE,
                f"Speculate, with {drafter.name}.",
                f"With {case.num_sequences:.1f} sequences at once it makes a request "
                f"{gain.speedup:.2f} times as fast for the target.",
                {"sequences": case.num_sequences, "speedup": gain.speedup},
            ),
            Finding(
                Topic.DEPTH,
                f"Up to {gain.depth} drafts a step, for up to {most} sequences at once.",
                f"The last of them is still kept in {share:.0%} of the drafts; with more "
                "sequences at once than that the rows cost more than they bring (the policy "
                "`adaptive` sees to it by itself).",
                {"depth": gain.depth, "survival": share, "pays_up_to": most},
            ),
            *_placement(case, place, num_workers),
            *around(facts),
        ),
    )


def _trial(case: Case) -> Advice:
    """Nothing is known of drafts: what they would have to be."""
    needed = needed_acceptance(
        case.facts, case.costs, case.drafter, num_sequences=case.num_sequences, worth=WORTH
    )
    at_full = needed_acceptance(
        case.facts,
        case.costs,
        case.drafter,
        num_sequences=case.facts.max_num_seqs,
        worth=WORTH,
    )
    if needed is None:
        return replace(_no(case), drafter=None)
    full = "and not at all" if at_full is None else f"and from {at_full:.0%} on"
    return Advice(
        answer=Answer.TRY,
        drafter=case.drafter.name,
        depth=case.facts.most_depth,
        place=_place(case),
        num_workers=_num_workers(case),
        findings=(
            Finding(
                Topic.SPECULATE,
                f"Try {case.drafter.name} under the policy `adaptive`, and ask again.",
                f"No draft was verified here yet. At {case.num_sequences:.1f} sequences at once "
                f"it pays if {needed:.0%} of the tokens are kept, {full} with all "
                f"{case.facts.max_num_seqs} places taken.",
                {"needed_acceptance": needed}
                | ({} if at_full is None else {"needed_acceptance_when_full": at_full}),
            ),
            *around(case.facts),
        ),
    )


def _no(case: Case) -> Advice:
    cause, finding = obstacle(case)
    place = _place(case) if cause is Cause.DRAFT_TIME else None
    return Advice(
        answer=Answer.NO,
        cause=cause,
        drafter=case.drafter.name,
        speedup=case.gain.speedup,
        place=place,
        findings=(
            finding,
            *(_placement(case, place, _num_workers(case)) if place else ()),
            *around(case.facts),
        ),
    )


def _place(case: Case) -> Place:
    """Where the drafter should run: off the target's memory, and near when the way is the wait."""
    drafter = case.drafter
    if takes_memory(drafter) and is_tight(case.facts):
        return Place.WORKERS
    if drafter.place is Place.WORKERS and _is_far(drafter):
        return Place.COLOCATED
    return drafter.place


def _is_far(drafter: DrafterFacts) -> bool:
    """Whether a step waits for the way to its workers more than for what they compute."""
    return drafter.wait_seconds > 2 * drafter.exchange_seconds > 0


def _num_workers(case: Case) -> int:
    """Workers that are busy for no more than BUSY_WORKER of their time; 0 where there are none."""
    drafter = case.drafter
    if _place(case) is Place.IN_PROCESS:
        return 0
    period = case.costs.seconds(case.num_sequences) + drafter.wait_seconds
    busy = case.facts.num_engines * drafter.exchange_seconds / period
    return max(math.ceil(busy / BUSY_WORKER), 1)


def _placement(case: Case, place: Place, num_workers: int) -> Iterator[Finding]:
    drafter = case.drafter
    figures = {
        "wait_seconds": drafter.wait_seconds,
        "exchange_seconds": drafter.exchange_seconds,
        "late_ratio": drafter.late_ratio,
    }
    if place is not drafter.place:
        why = (
            "It takes memory in the target's process, of which sequences are short."
            if place is Place.WORKERS
            else f"A step waits {drafter.wait_seconds * MILLI:.1f} ms for a draft that a worker "
            f"computes in {drafter.exchange_seconds * MILLI:.1f} ms: the rest is the way."
        )
        yield Finding(
            Topic.PLACEMENT, f"Move {drafter.name}: placement {place.value}.", why, figures
        )
    elif drafter.memory_bytes == 0 and place is Place.IN_PROCESS:
        yield Finding(
            Topic.PLACEMENT,
            f"Leave {drafter.name} in the engine's process.",
            "It needs neither memory to speak of nor a device.",
        )
    else:
        yield Finding(
            Topic.PLACEMENT,
            f"Leave {drafter.name} where it is: {place.value}.",
            f"A step waits {drafter.wait_seconds * MILLI:.1f} ms for it, and "
            f"{drafter.token_seconds * MILLI:.1f} ms for each token.",
            figures,
        )
    if num_workers:
        yield Finding(
            Topic.WORKERS,
            f"{num_workers} draft workers for {case.facts.num_engines} engines.",
            f"An exchange takes a worker {drafter.exchange_seconds * MILLI:.1f} ms, once a step; "
            f"so many are busy at most {BUSY_WORKER:.0%} of the time.",
            {"num_workers": num_workers, "now": drafter.num_workers},
        )
