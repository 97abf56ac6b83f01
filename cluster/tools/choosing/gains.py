"""What drafts bring at what they cost: the target's seconds of one request, with and without."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from cluster.tools.choosing.facts import DrafterFacts, Facts, StepCosts

LONG_ANSWER_TOKENS = 4096.0
BISECTIONS = 30


@dataclass(frozen=True, slots=True)
class Gain:
    """The drafts a step that bring most, and the target's time without drafts to that with them."""

    depth: int
    speedup: float


NOTHING = Gain(0, 1.0)


def best_gain(
    facts: Facts, costs: StepCosts, drafter: DrafterFacts, *, num_sequences: float
) -> Gain:
    """The best depth for so many sequences at once; none, if no depth is better than that.

    Never smaller for a larger survival, a shorter wait or, all else being equal, longer answers.
    """
    plain = _request_seconds(facts, costs, num_sequences, 1.0, costs.seconds(num_sequences))
    best = NOTHING
    tokens_a_step = 1.0
    for depth, chance in enumerate(accumulate(drafter.survival[: facts.most_depth], min), start=1):
        tokens_a_step += drafter.coverage * chance
        rows = num_sequences * (1 + drafter.coverage * depth)
        waiting = drafter.wait_seconds + depth * drafter.token_seconds
        step = costs.seconds(rows) + waiting
        spent = _request_seconds(facts, costs, num_sequences, tokens_a_step, step)
        best = max(best, Gain(depth, plain / spent), key=lambda gain: gain.speedup)
    return best


def _request_seconds(
    facts: Facts, costs: StepCosts, num_sequences: float, tokens_a_step: float, step: float
) -> float:
    """A request's share of the target's time: its prompt with its first token, and its answer."""
    answer = LONG_ANSWER_TOKENS if facts.answer_tokens is None else facts.answer_tokens
    prompt = (facts.prompt_tokens or 0.0) * costs.row_seconds
    first = costs.seconds(num_sequences) / num_sequences
    num_steps = max(answer - 1, 0.0) / max(min(tokens_a_step, answer - 1), 1.0)
    return prompt + first + num_steps * step / num_sequences


def pays_up_to(facts: Facts, costs: StepCosts, drafter: DrafterFacts, *, worth: float) -> int:
    """The most sequences at once, of those an engine takes, for which it pays; 0 if for none."""
    return max(
        (
            number
            for number in range(1, facts.max_num_seqs + 1)
            if best_gain(facts, costs, drafter, num_sequences=number).speedup >= worth
        ),
        default=0,
    )


def needed_acceptance(
    facts: Facts, costs: StepCosts, drafter: DrafterFacts, *, num_sequences: float, worth: float
) -> float | None:
    """The least chance of each draft token to be kept from which on the drafter pays, if any."""

    def pays(acceptance: float) -> bool:
        survival = tuple(acceptance**position for position in range(1, facts.most_depth + 1))
        what = replace(drafter, survival=survival)
        return best_gain(facts, costs, what, num_sequences=num_sequences).speedup >= worth

    return _least(pays, most=1.0)


def needed_answer_tokens(
    facts: Facts, costs: StepCosts, drafter: DrafterFacts, *, num_sequences: float, worth: float
) -> float | None:
    """The shortest answers for which the drafter pays, if any."""

    def pays(answer_tokens: float) -> bool:
        longer = replace(facts, answer_tokens=answer_tokens)
        return best_gain(longer, costs, drafter, num_sequences=num_sequences).speedup >= worth

    return _least(pays, most=LONG_ANSWER_TOKENS)


def _least(pays: Callable[[float], bool], *, most: float) -> float | None:
    """Where it begins to pay, between nothing and the most."""
    if not pays(most):
        return None
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
