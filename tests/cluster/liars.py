"""A draft worker that lies. In a file of its own, since its process has to import it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from cluster.actors.draft import DraftWorker
from cluster.config import DrafthouseConfig, ModelDrafterConfig
from cluster.messages import Draft, ExchangeInput, ExchangeOutput

NUM_IDS = 1024  # twice what there are in the vocabulary
NAN = float("nan")


class Liar(DraftWorker):
    """Follows every sequence as it should, and answers by one lie after the other."""

    def __init__(self, config: DrafthouseConfig, drafter: ModelDrafterConfig) -> None:
        super().__init__(config, drafter)
        self._random = Random(1)
        self._num_lies = 0

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """What it knows better."""
        lie = LIES[self._num_lies % len(LIES)]
        self._num_lies += 1
        return lie(super().exchange(message), self._random)

    def num_lies(self) -> int:
        """Told so far."""
        return self._num_lies


def _others(answer: ExchangeOutput, random: Random) -> ExchangeOutput:
    """Tokens of the vocabulary, but any."""
    return _drafted(answer, random, num_tokens=4, num_ids=NUM_IDS // 2)


def _no_tokens(answer: ExchangeOutput, random: Random) -> ExchangeOutput:
    """Some that are no tokens."""
    return _drafted(answer, random, num_tokens=4, num_ids=NUM_IDS)


def _too_many(answer: ExchangeOutput, random: Random) -> ExchangeOutput:
    """More than were asked for."""
    return _drafted(answer, random, num_tokens=500, num_ids=NUM_IDS // 2)


def _of_strangers(answer: ExchangeOutput, random: Random) -> ExchangeOutput:
    """Drafts of sequences that nobody asked about."""
    del random
    return replace(answer, drafts={seq_id + 1000: each for seq_id, each in answer.drafts.items()})


def _of_another_step(answer: ExchangeOutput, random: Random) -> ExchangeOutput:
    """The answer to a message that was answered already."""
    del random
    return replace(answer, step_id=answer.step_id - 1)


def _nonsense(answer: ExchangeOutput, random: Random) -> Any:  # noqa: ANN401 - that is the lie
    """No answer at all."""
    return random.choice([None, 7, replace(answer, drafts=dict.fromkeys(answer.drafts))])  # type: ignore[arg-type]


LIES: tuple[Callable[[ExchangeOutput, Random], ExchangeOutput], ...] = (
    *(_others,) * 8,
    _no_tokens,
    _too_many,
    _of_strangers,
    _of_another_step,
    _nonsense,
)


def _drafted(
    answer: ExchangeOutput, random: Random, *, num_tokens: int, num_ids: int
) -> ExchangeOutput:
    """Any ids instead of every draft, with margins that are no numbers."""
    return replace(
        answer,
        drafts={
            seq_id: Draft(
                tuple(random.randrange(num_ids) for _ in range(num_tokens)),
                (),
                (NAN,) * num_tokens,
                "liar",
            )
            for seq_id in answer.drafts
        },
    )
