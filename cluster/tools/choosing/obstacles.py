"""Why it does not pay: the one change that would bring most, of those after which it would."""

from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.tools.choosing.facts import DrafterFacts, Facts, StepCosts
from cluster.tools.choosing.findings import MILLI, Finding, Topic
from cluster.tools.choosing.gains import (
    LONG_ANSWER_TOKENS,
    Gain,
    best_gain,
    needed_acceptance,
    needed_answer_tokens,
    pays_up_to,
)

WORTH = 1.03  # what speculation must bring before it is advised


class Cause(StrEnum):
    """What stands in the way: with that alone changed it would pay."""

    LOAD = "load"
    SHORT_ANSWERS = "short_answers"
    DRAFT_TIME = "draft_time"
    ACCEPTANCE = "acceptance"


@dataclass(frozen=True, slots=True)
class Case:
    """The drafter that is judged, under the load there is."""

    facts: Facts
    costs: StepCosts
    drafter: DrafterFacts
    num_sequences: float

    @property
    def gain(self) -> Gain:
        """What it brings."""
        return best_gain(self.facts, self.costs, self.drafter, num_sequences=self.num_sequences)


def obstacle(case: Case) -> tuple[Cause, Finding]:
    """The change that would bring most, of those after which it would pay."""
    facts, costs, drafter = case.facts, case.costs, case.drafter
    at_once = replace(drafter, wait_seconds=0.0, token_seconds=0.0)
    kept = replace(drafter, survival=(1.0,) * facts.most_depth)
    changed = {
        Cause.ACCEPTANCE: replace(case, drafter=kept),
        Cause.DRAFT_TIME: replace(case, drafter=at_once),
        Cause.LOAD: replace(case, num_sequences=1.0),
        Cause.SHORT_ANSWERS: replace(case, facts=replace(facts, answer_tokens=LONG_ANSWER_TOKENS)),
    }
    gains = {cause: each.gain.speedup for cause, each in changed.items()}
    cause = max(gains, key=gains.__getitem__)
    if gains[cause] < WORTH:
        cause = Cause.ACCEPTANCE
    now = f"Of all depths the best makes a request {case.gain.speedup:.2f} times as fast"
    match cause:
        case Cause.DRAFT_TIME:
            wait = drafter.wait_seconds + drafter.token_seconds
            return cause, Finding(
                Topic.SPECULATE,
                f"Not with {drafter.name} where it is: its drafts come too late.",
                f"{now}; a step waits {wait * MILLI:.1f} ms for a draft, and takes "
                f"{costs.seconds(case.num_sequences) * MILLI:.1f} ms itself. Drafts that are "
                f"there at once would make it {gains[cause]:.2f} times as fast.",
                {"wait_seconds": wait, "speedup_without_wait": gains[cause]},
            )
        case Cause.LOAD:
            most = pays_up_to(facts, costs, drafter, worth=WORTH)
            return cause, Finding(
                Topic.SPECULATE,
                f"Not under this load: it pays for up to {most} sequences at once.",
                f"{now} with {case.num_sequences:.1f} at once, where one row more costs "
                f"{costs.row_seconds * MILLI:.2f} ms; alone it would be {gains[cause]:.2f}. "
                "Guessing less comes before more targets, and with more targets it pays again.",
                {"pays_up_to": most, "speedup_alone": gains[cause]},
            )
        case Cause.SHORT_ANSWERS:
            least = needed_answer_tokens(
                facts, costs, drafter, num_sequences=case.num_sequences, worth=WORTH
            )
            return cause, Finding(
                Topic.SPECULATE,
                "Not for answers this short.",
                f"{now}: an answer has {facts.answer_tokens or 0:.0f} tokens after a prompt of "
                f"{facts.prompt_tokens or 0:.0f}, so there is little to guess. From about "
                f"{least or 0:.0f} tokens on it pays.",
                {"answer_tokens": facts.answer_tokens or 0, "needed_answer_tokens": least or 0},
            )
        case Cause.ACCEPTANCE:
            return cause, _poor(case, now)


def _poor(case: Case, now: str) -> Finding:
    needed = needed_acceptance(
        case.facts, case.costs, case.drafter, num_sequences=case.num_sequences, worth=WORTH
    )
    first = case.drafter.survival[0] if case.drafter.survival else 0.0
    wanted = (
        "None would pay here."
        if needed is None
        else f"{needed:.0%} would have to be: try prompt lookup (`ngram`), `drafthouse tune "
        "ngram`, or a draft that was trained for this target."
    )
    return Finding(
        Topic.SPECULATE,
        f"Not with {case.drafter.name}: too few of its drafts are kept.",
        f"{now}. Of first positions {first:.0%} are kept. {wanted}",
        {"acceptance": first} | ({} if needed is None else {"needed_acceptance": needed}),
    )
