"""What drafts should bring, from the cost table and from what became of drafts: no clock runs.

Two questions. How long answers of known lengths take, drafted for with one K: they are played step
by step, each step bringing what some real step of the same kind of text brought. And what the
controller would make of drafts like these under a load that lasts: its own arithmetic.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.control.cost import CostTable
from cluster.control.draft_cost import DraftCost
from cluster.control.optimum import FloatArray, best_rate
from cluster.control.policy import StepShape
from cluster.tools.choosing.drafted import Steps, together
from cluster.tools.choosing.facts import StepCosts

NUM_PLAYS = 5
NUM_DRAWN = 2048  # drafts, over all scenarios
LEAST_SCENARIOS = 32


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a step: the target's, the wait for drafts, and the rest by sequences."""

    target: CostTable
    draft: DraftCost
    rest: StepCosts


@dataclass(frozen=True, slots=True)
class Planned:
    """A request whose answer's length is known, and the kind of steps that it is made in."""

    prompt_tokens: int
    answer_tokens: int
    category: str


Wave = Sequence[Planned]
Kinds = Mapping[str, Steps]


def predicted_seconds(
    waves: Sequence[Wave],
    kinds: Kinds,
    prices: Prices,
    *,
    num_speculative_tokens: int,
    max_tokens: int,
) -> float:
    """Of all waves from their first tokens to their last, on average over some plays.

    A request drafts at most as many as it may still bring, less one. Of a kind without steps those
    of all kinds have to do.
    """
    everything = together(kinds.values())
    filled = {name: steps if steps.outcomes else everything for name, steps in kinds.items()}
    return statistics.fmean(
        sum(
            _played(wave, filled, prices, num_speculative_tokens, max_tokens, random.Random(play))
            for wave in waves
        )
        for play in range(NUM_PLAYS)
    )


def _played(
    wave: Wave,
    kinds: Kinds,
    prices: Prices,
    num_speculative_tokens: int,
    max_tokens: int,
    chances: random.Random,
) -> float:
    """Seconds of one wave, whose requests all have their first token."""
    made = {number: 1 for number, each in enumerate(wave) if each.answer_tokens > 1}
    seconds = 0.0
    while made:
        num_asked = num_drafted = 0
        shape = StepShape(
            num_sequences=len(made),
            num_rows=len(made),
            num_context_tokens=sum(wave[at].prompt_tokens + count for at, count in made.items()),
        )
        for number, count in list(made.items()):
            request = wave[number]
            most = min(num_speculative_tokens, max_tokens - count - 1)
            drafted = kept = 0
            outcomes = kinds[request.category].outcomes if most > 0 else ()
            if outcomes:
                drafted, kept = chances.choice(outcomes)
                num_asked += 1
            num_drafted += min(drafted, most)
            made[number] = count + 1 + max(min(kept, most), 0)
            if made[number] >= request.answer_tokens:
                del made[number]
        seconds += prices.target.seconds(shape, num_drafted)
        seconds += prices.rest.seconds(shape.num_sequences)
        seconds += prices.draft.seconds(num_asked, num_drafted)
    return seconds


@dataclass(frozen=True, slots=True)
class Expected:
    """What the controller should make of so many sequences at once: verified drafts of each."""

    num_sequences: int
    depth: float
    speedup: float


def expected_under_control(
    kinds: Kinds, prices: Prices, *, num_sequences: int, context: int
) -> Expected:
    """The best that drafts like these bring under a lasting load of all kinds of text.

    Where they bring nothing none are made, and it is 1. Nothing is known of a single draft before
    it is verified but where its tokens are; the controller knows more.
    """
    offers, num_drafted = _offers(kinds, num_sequences)
    shape = StepShape(
        num_sequences=num_sequences,
        num_rows=num_sequences,
        num_context_tokens=num_sequences * context,
    )
    costs = prices.target.seconds(shape, np.arange(offers.shape[1] + 1))
    costs = costs + prices.rest.seconds(num_sequences)
    rate = best_rate(offers, costs, plain=float(num_sequences))
    waiting = prices.draft.seconds(num_sequences, num_drafted)
    speedup = rate.when_waiting(waiting) * float(costs[0]) / num_sequences
    if rate.num_rows == 0 or speedup <= 1:
        return Expected(num_sequences, 0.0, 1.0)
    return Expected(num_sequences, rate.num_rows / num_sequences, speedup)


def _offers(kinds: Kinds, num_sequences: int) -> tuple[FloatArray, int]:
    """Survivals of the drafts of so many sequences `[scenarios, drafts]`, and how many on average.

    Each sequence has a draft as long as some real one, which is kept as those of its kind are.
    """
    chances = random.Random(0)
    names = [name for name, steps in kinds.items() if steps.outcomes]
    most = max(len(together(kinds.values()).survival), 1)
    num_scenarios = max(NUM_DRAWN // num_sequences, LEAST_SCENARIOS)
    offers = np.zeros((num_scenarios, num_sequences, most))
    num_drafted = 0
    for scenario in range(num_scenarios if names else 0):
        for number in range(num_sequences):
            steps = kinds[chances.choice(names)]
            drafted, _ = chances.choice(steps.outcomes)
            offers[scenario, number, :drafted] = steps.survival[:drafted]
            num_drafted += drafted
    return offers.reshape(num_scenarios, -1), round(num_drafted / num_scenarios)
