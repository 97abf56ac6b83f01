"""From what the engines did to what is said of each draft: predicted, measured, and wasted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from cluster.control.policy import StepShape
from cluster.tools.bench.figures import Rounds
from cluster.tools.bench.lanes import Variant
from cluster.tools.choosing.compare_plan import Asked, ComparePlan
from cluster.tools.choosing.comparison import Candidate, Cell
from cluster.tools.choosing.drafted import Steps
from cluster.tools.choosing.prediction import (
    Kinds,
    Planned,
    Prices,
    expected_under_control,
    predicted_seconds,
)

MOST_EXPECTED = 64  # sequences at once, for which something is foreseen


def candidate_of(
    plan: ComparePlan,
    asked: Asked,
    candidate: Candidate,
    rounds: Mapping[int, Mapping[Variant, Rounds]],
    prices: Prices,
    *,
    draft_token_seconds: float,
) -> Candidate:
    """A draft with all that was found."""
    off = Variant(plan.dtype)
    lowest = asked.plan.concurrencies[0]
    deepest = rounds[lowest][Variant(plan.dtype, candidate.draft, plan.most)]
    kinds = kinds_of(deepest, asked.categories)
    cells = [
        _cell(
            plan,
            asked,
            kinds,
            prices,
            concurrency=concurrency,
            number=number,
            on=measured[Variant(plan.dtype, candidate.draft, number)],
            off=measured[off],
        )
        for concurrency, measured in rounds.items()
        for number in asked.plan.num_speculative_tokens
    ]
    context = sum(map(len, asked.prompts)) // len(asked.prompts) + plan.max_tokens // 2
    powers = [2**power for power in range(MOST_EXPECTED.bit_length())]
    return replace(
        candidate,
        kinds=kinds,
        draft_token_seconds=draft_token_seconds,
        cells=tuple(cells),
        expected=tuple(
            expected_under_control(kinds, prices, num_sequences=number, context=context)
            for number in powers
        ),
    )


def _cell(
    plan: ComparePlan,
    asked: Asked,
    kinds: Kinds,
    prices: Prices,
    *,
    concurrency: int,
    number: int,
    on: Rounds,
    off: Rounds,
) -> Cell:
    """One draft with one K at one concurrency, predicted and measured."""
    waves = _planned(off, asked, concurrency)
    plain, drafted = (
        predicted_seconds(
            waves, kinds, prices, num_speculative_tokens=k, max_tokens=plan.max_tokens
        )
        for k in (0, number)
    )
    return Cell(
        concurrency=concurrency,
        num_speculative_tokens=number,
        rounds=on,
        off=off,
        predicted=plain / drafted if drafted else 1.0,
        wasted_seconds=_wasted_seconds(on, prices, concurrency),
    )


def _planned(off: Rounds, asked: Asked, concurrency: int) -> list[list[Planned]]:
    """The waves of one round, whose answers are as long as they are without drafts."""
    return [
        [
            Planned(len(asked.prompts[at]), stream.num_tokens, asked.categories[at])
            for at, stream in enumerate(wave.streams, start=number * concurrency)
        ]
        for number, wave in enumerate(off.rounds[0])
    ]


def _wasted_seconds(on: Rounds, prices: Prices, concurrency: int) -> float:
    """Of a mean step, for rows that were thrown away: beyond what the kept ones cost."""
    steps = Steps(tuple(chain.from_iterable(stream.drafts[1:] for stream in on.streams)))
    number = max(len(steps.outcomes), 1)
    shape = StepShape(
        num_sequences=concurrency, num_rows=concurrency, num_context_tokens=concurrency
    )
    drafted, kept = (
        round(concurrency * count / number) for count in (steps.num_drafted, steps.num_kept)
    )
    return prices.target.seconds(shape, drafted) - prices.target.seconds(shape, kept)


def kinds_of(rounds: Rounds, categories: Sequence[str]) -> dict[str, Steps]:
    """What became of drafts by category, in the first round; an answer's first step has none."""
    outcomes: dict[str, list[tuple[int, int]]] = {name: [] for name in dict.fromkeys(categories)}
    streams = chain.from_iterable(wave.streams for wave in rounds.rounds[0])
    for stream, category in zip(streams, categories, strict=False):
        outcomes[category] += stream.drafts[1:]
    return {name: Steps(tuple(each)) for name, each in outcomes.items()}
