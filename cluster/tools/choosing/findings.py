"""What the figures of a cluster say by themselves, whatever is advised."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.tools.choosing.facts import DrafterFacts, Facts, Place

FULL_KV = 0.9  # of its blocks, from which on memory is tight
SOME_PREEMPTIONS = 0.02  # of a request
FULL_MEMORY = 0.9  # of what there is
MILLI = 1000


class Topic(StrEnum):
    """What a finding is about."""

    SPECULATE = "speculate"
    DEPTH = "depth"
    PLACEMENT = "placement"
    WORKERS = "workers"
    STEP = "step"
    LOAD = "load"
    MEMORY = "memory"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Finding:
    """What to do or to know, why, and the figures that say so."""

    topic: Topic
    says: str
    because: str
    figures: Mapping[str, float] = field(default_factory=dict)


def around(facts: Facts) -> Iterator[Finding]:
    """What else the figures say, whatever was advised."""
    yield from _step(facts)
    yield from _load(facts)
    yield from _memory(facts)
    for drafter in facts.drafters:
        if drafter.survival:
            kept = ", ".join(f"{chance:.0%}" for chance in drafter.survival)
            yield Finding(
                Topic.DRAFTER,
                f"{drafter.name}: {sum(drafter.survival):.2f} tokens of a draft are kept.",
                f"By position {kept}; {drafter.coverage:.0%} of those asked for bring one, and "
                f"{drafter.late_ratio:.0%} come late.",
                {"accepted": sum(drafter.survival), "coverage": drafter.coverage},
            )


def _step(facts: Facts) -> Iterator[Finding]:
    if facts.costs is None:
        return
    floor = facts.costs.floor_seconds
    seconds = facts.step_seconds or facts.costs.seconds(max(facts.running or 1.0, 1.0))
    over = seconds / floor
    yield Finding(
        Topic.STEP,
        f"A step takes {over:.2f} times what a single row does.",
        f"{seconds * MILLI:.1f} ms, and {floor * MILLI:.1f} ms is the floor that reading the "
        f"weights sets; a row more costs {facts.costs.row_seconds * MILLI:.2f} ms where there "
        "are many.",
        {"step_seconds": seconds, "floor_seconds": floor, "over_floor": over},
    )


def _load(facts: Facts) -> Iterator[Finding]:
    if facts.running is None:
        return
    waiting, queue = facts.waiting or 0.0, facts.queue_seconds or 0.0
    figures = {"running": facts.running, "waiting": waiting, "queue_seconds": queue}
    if facts.utilisation is not None:
        figures["utilisation"] = facts.utilisation
    busy = "" if facts.utilisation is None else f", its target computes {facts.utilisation:.0%}"
    says = "Requests wait: more targets, or fewer at once." if waiting >= 1 else "Nobody waits."
    answers = (
        "" if facts.answer_tokens is None else f" Answers have {facts.answer_tokens:.0f} tokens."
    )
    yield Finding(
        Topic.LOAD,
        says,
        f"An engine has {facts.running:.1f} of {facts.max_num_seqs} places taken{busy} of the "
        f"time, and {waiting:.1f} requests waiting, for {queue:.2f} s.{answers}",
        figures,
    )


def _memory(facts: Facts) -> Iterator[Finding]:
    figures = {
        name: float(value)
        for name in (
            "kv_usage",
            "preemptions_per_request",
            "weight_bytes",
            "kv_bytes",
            "available_bytes",
        )
        if (value := getattr(facts, name)) is not None
    }
    if not figures:
        return
    parts = [
        f"{figures[name] / 2**20:,.0f} MiB {what}"
        for name, what in (
            ("weight_bytes", "of weights"),
            ("kv_bytes", "for keys and values"),
            ("available_bytes", "available"),
        )
        if name in figures
    ]
    if "kv_usage" in figures:
        parts.append(f"{figures['kv_usage']:.0%} of the KV blocks in use")
    if "preemptions_per_request" in figures:
        parts.append(f"{figures['preemptions_per_request']:.2f} preemptions a request")
    says = (
        "Memory is tight: no draft model beside the target."
        if is_tight(facts)
        else "Memory is no obstacle."
    )
    yield Finding(Topic.MEMORY, says, ", ".join(parts) + ".", figures)


def takes_memory(drafter: DrafterFacts) -> bool:
    """Whether it takes memory that the target's sequences could have."""
    return drafter.place is Place.IN_PROCESS and drafter.memory_bytes > 0


def is_tight(facts: Facts) -> bool:
    """Whether sequences are short of memory."""
    needed = (facts.weight_bytes or 0) + (facts.kv_bytes or 0)
    needed += sum(each.memory_bytes for each in facts.drafters if takes_memory(each))
    return (
        (facts.kv_usage or 0.0) >= FULL_KV
        or (facts.preemptions_per_request or 0.0) >= SOME_PREEMPTIONS
        or (facts.available_bytes is not None and needed > FULL_MEMORY * facts.available_bytes)
    )
