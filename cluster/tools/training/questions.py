"""What the target is asked: an operator's prompts, and more that it writes itself.

A chat model that is given the beginning of a user's turn goes on as users do (Magpie,
arXiv:2406.08464). There is no end to such prompts, and no answer to them is learned twice.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from cluster.errors import InvalidRequest
from cluster.text.tokenizer import ChatMessage, Tokenizer
from cluster.tools.bench.workloads import Prompt, by_category
from cluster.tools.training.plan import TrainPlan

OWN = "own"
HELD_OUT = "held_out.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt, or, without one, one that the target has to write first."""

    number: int
    category: str
    prompt: Prompt | None


@dataclass(frozen=True, slots=True)
class Questions:
    """Those to learn from, which may be followed by the target's own, and those held out."""

    given: tuple[Question, ...]
    held_out: tuple[Question, ...]
    own_prompts: bool

    def to_learn(self) -> Iterator[Question]:
        """One after another, without end if the target writes its own."""
        yield from self.given
        if self.own_prompts:
            first = len(self.given) + len(self.held_out)
            for number in count(first):
                yield Question(number=number, category=OWN, prompt=None)

    def write_held_out(self, file: Path) -> None:
        """As JSON lines, for `compare-drafts --prompts`."""
        file.write_text("".join(f"{json.dumps(_line(each))}\n" for each in self.held_out))


def questions_of(plan: TrainPlan) -> Questions:
    """All of a plan's, categories in turn. Raises ConfigurationError naming a line."""
    given: list[Question] = []
    held_out: list[Question] = []
    categories = by_category(plan.prompts, category_field=plan.category_field)
    number = 0
    for place in range(max(map(len, categories.values()))):
        for category, prompts in categories.items():
            if place >= len(prompts):
                continue
            question = Question(number=number, category=category, prompt=prompts[place])
            is_held_out = place % plan.held_out_every == plan.held_out_every - 1
            (held_out if is_held_out else given).append(question)
            number += 1
    return Questions(tuple(given), tuple(held_out), plan.own_prompts)


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens around what a user says."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def user_turn(tokenizer: Tokenizer) -> Turn | None:
    """How a model's template has it; None where there is no template to tell."""
    try:
        first, second = (
            tokenizer.chat([ChatMessage(role="user", content=text)]) for text in ("a", "Z")
        )
    except InvalidRequest:
        return None
    before = _common(first, second)
    after = _common(first[::-1], second[::-1])[::-1]
    return Turn(before, after) if before and after else None


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """What both begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token_id for token_id, _ in pairs)


def _line(question: Question) -> dict[str, object]:
    prompt: Prompt | Sequence[ChatMessage] | None = question.prompt
    if isinstance(prompt, str):
        return {"category": question.category, "prompt": prompt}
    messages = [{"role": each.role, "content": each.content} for each in prompt or ()]
    return {"category": question.category, "messages": messages}
