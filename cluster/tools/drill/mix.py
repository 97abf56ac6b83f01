"""A mixed load: answers that are read to their end, cancelled, late, or never to be had."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.tools.drill.client import message_of
from cluster.tools.drill.questions import Answer, Question
from protos import inference_pb2

SHARES = {"plain": 0.5, "cancel": 0.2, "deadline": 0.2, "bad": 0.1}
LEAST_TOKENS = 8
SHORTEST_DEADLINE, LONGEST_DEADLINE = 0.5, 8.0  # of what an answer usually takes


class Sort(StrEnum):
    """What a client does, and what it is to see."""

    PLAIN = "plain"  # reads to the end
    CANCEL = "cancel"  # goes away in the middle
    DEADLINE = "deadline"  # has no use for the answer after some time
    BAD = "bad"  # asks for what cannot be served


Message = inference_pb2.GenerateRequest


def _hot(message: Message) -> None:
    message.sampling.temperature = -1.0


def _strange_token(message: Message) -> None:
    message.token_ids.append(2**31)


def _empty(message: Message) -> None:
    del message.token_ids[:]


def _too_long(message: Message) -> None:
    message.token_ids.extend([LEAST_TOKENS] * 200_000)


def _many_answers(message: Message) -> None:
    message.sampling.num_answers = 1000


def _two_prompts(message: Message) -> None:
    message.prompt = "and token ids"


BAD: tuple[Callable[[Message], None], ...] = (
    _hot,
    _strange_token,
    _empty,
    _too_long,
    _many_answers,
    _two_prompts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One client's request: `cancel_after` tokens it goes away, after `deadline_seconds` too."""

    sort: Sort
    message: Message
    expected: Answer
    cancel_after: int | None = None
    deadline_seconds: float | None = None


class Mix:
    """Draws orders from questions whose answers are known."""

    def __init__(
        self,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        *,
        answer_seconds: float,
        seed: int,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self._shares = shares or SHARES
        self._asked = tuple(zip(questions, answers, strict=True))
        self._answer_seconds = answer_seconds
        self._random = random.Random(seed)

    def draw(self) -> Order:
        """The next one: any length, as the beginning of an answer is that of a shorter one."""
        question, answer = self._random.choice(self._asked)
        num_tokens = self._random.randint(
            min(LEAST_TOKENS, question.max_tokens), question.max_tokens
        )
        message = message_of(replace(question, max_tokens=num_tokens))
        expected = Answer(answer.token_ids[:num_tokens], answer.logprobs[:num_tokens])
        [sort] = self._random.choices(list(Sort), [self._shares.get(sort, 0.0) for sort in Sort])
        order = Order(sort=sort, message=message, expected=expected)
        match sort:
            case Sort.CANCEL:
                return replace(order, cancel_after=self._random.randrange(num_tokens))
            case Sort.DEADLINE:
                share = self._random.uniform(SHORTEST_DEADLINE, LONGEST_DEADLINE)
                return replace(order, deadline_seconds=share * self._answer_seconds)
            case Sort.BAD:
                self._random.choice(BAD)(message)
        return order

    def pause(self, rate: float) -> float:
        """Seconds until the next one, at so many a second on average."""
        return self._random.expovariate(rate)
