"""What a comparison means, in plain words: which draft to take, where each stops paying, and why.

All of it is of what was measured: how much is kept is never by itself a reason for or against.
"""

from collections.abc import Iterator

from cluster.tools.choosing.comparison import MIB, MILLI, Candidate, Cell, Comparison, times

WARN_RATE = 0.6  # of drafted tokens that are kept: below, it is said what was lost
EXPLAIN_RATE = 0.5


def words_of(comparison: Comparison) -> tuple[str, ...]:
    """Sentences, the choice first."""
    return tuple(_sentences(comparison))


def _sentences(comparison: Comparison) -> Iterator[str]:
    measured = comparison.measured
    for concurrency in measured[0].concurrencies if measured else ():
        yield _choice(comparison, concurrency)
    for candidate in measured:
        yield _limit(candidate)
        yield from _kept(candidate)
    for candidate in comparison.candidates:
        if candidate.problems:
            yield f"{candidate.draft} was left out: {'; '.join(candidate.problems)}."


def _choice(comparison: Comparison, concurrency: int) -> str:
    """What to take there: the fastest, or nothing."""
    best = max(
        comparison.measured, key=lambda candidate: candidate.best(concurrency).measured or 0.0
    )
    cell = best.best(concurrency)
    if cell.measured is None:
        return f"{concurrency} at once: the answers are too short to tell."
    if cell.measured <= 1:
        return (
            f"{concurrency} at once: take no drafts. The best, {best.draft} with "
            f"K={cell.num_speculative_tokens}, makes it {cell.measured:.2f} times as fast."
        )
    rest = [
        f"{each.draft} {times(each.best(concurrency).measured)}"
        for each in comparison.measured
        if each is not best
    ]
    beside = f" (beside {', '.join(rest)})" if rest else ""
    return (
        f"{concurrency} at once: take {best.draft} with K={cell.num_speculative_tokens}: "
        f"{cell.measured:.2f} times as fast as without drafts{beside}."
    )


def _limit(candidate: Candidate) -> str:
    """Where it stops paying, as measured and as foreseen beyond."""
    foreseen = [each.num_sequences for each in candidate.expected if each.speedup <= 1]
    beyond = (
        f"by the controller's arithmetic drafts like these bring nothing from {foreseen[0]} on"
        if foreseen
        else "by the controller's arithmetic drafts like these pay up to "
        f"{max((each.num_sequences for each in candidate.expected), default=0)}"
    )
    if candidate.stops_at is None:
        most = max(candidate.concurrencies)
        return f"{candidate.draft} pays up to {most} at once, the most measured; {beyond}."
    return f"{candidate.draft} stops paying at {candidate.stops_at} at once; {beyond}."


def _kept(candidate: Candidate) -> Iterator[str]:
    """Of a draft of which little is kept: what that costs here."""
    for name, steps in {"all text": candidate.steps, **(candidate.kinds or {})}.items():
        rate = steps.acceptance_rate
        if rate is None or rate >= WARN_RATE:
            continue
        if rate >= EXPLAIN_RATE or name != "all text":
            yield f"Mind {candidate.draft} on {name}: {rate:.0%} of its drafts are kept."
            continue
        yield f"{candidate.draft}: {rate:.0%} of its drafts are kept. {_cost(candidate)}"


def _cost(candidate: Candidate) -> str:
    """What drafts that are thrown away cost, at every concurrency, and what is left."""
    parts = [_cost_at(candidate.best(concurrency)) for concurrency in candidate.concurrencies]
    return f"{'; '.join(parts)}. It takes {candidate.memory_bytes / MIB:,.0f} MiB."


def _cost_at(cell: Cell) -> str:
    step, waiting = cell.step_seconds
    rate = cell.rounds.acceptance_rate or 0.0
    return (
        f"{cell.concurrency} at once with K={cell.num_speculative_tokens}: of a step's "
        f"{step * MILLI:.1f} ms rows that are thrown away take {cell.wasted_seconds * MILLI:.1f} "
        f"and making them {waiting * (1 - rate) * MILLI:.1f}, and what is kept makes it "
        f"{times(cell.measured)}"
    )
