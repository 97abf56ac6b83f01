"""What drafts would be kept of answers that were held out."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from cluster.control.cost import CostTable
from cluster.control.policy import StepShape
from cluster.tools.training.batches import Batch, Batches
from cluster.tools.training.corpus import Entry
from cluster.tools.training.trainee import Trainee

DEPTHS = 4  # of a draft that are looked at
ALL = "all"
SHORT = 128  # tokens of context that a speed-up is predicted for


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of drafts from every position of answers: the chance of each token once all before it were.

    `conditional` is of greedy answers, `overlap` that of the two distributions at a temperature
    of 1 (what speculative sampling keeps). `num_drafts` were looked at.
    """

    conditional: tuple[float, ...]
    overlap: tuple[float, ...]
    num_drafts: int

    @property
    def survival(self) -> tuple[float, ...]:
        """The chance of each token that it and all before it are kept."""
        return tuple(accumulate(self.conditional, mul))

    @property
    def accepted_per_step(self) -> float:
        """Of drafts of so many tokens."""
        return sum(self.survival)

    def speedup(self, costs: CostTable, draft_share: float) -> float:
        """Of one sequence at the best depth; 1 where no depth pays.

        Each drafted token takes `draft_share` of a step of one row, as its weights are to the
        target's.
        """
        one = StepShape(num_sequences=1, num_rows=1, num_context_tokens=SHORT)
        plain = costs.seconds(one)
        best, tokens = 1.0, 1.0
        for depth, survival in enumerate(self.survival, start=1):
            tokens += survival
            seconds = costs.seconds(one, depth) + depth * draft_share * plain
            best = max(best, tokens * plain / seconds)
        return best

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "conditional": list(self.conditional),
            "overlap": list(self.overlap),
            "accepted_per_step": self.accepted_per_step,
            "num_drafts": self.num_drafts,
        }


@torch.no_grad()
def evaluate(
    trainee: Trainee,
    entries: Sequence[Entry],
    *,
    longest: int,
    device: str = "cpu",
    num_depths: int = DEPTHS,
) -> Mapping[str, Acceptance]:
    """By category, and of all. Answers must be greedy, since their tokens are what is right."""
    by_category: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_category[entry.category].append(entry)
    was_training = trainee.training
    trainee.eval()
    sums = {
        category: _counted(trainee, own, longest, device, num_depths)
        for category, own in by_category.items()
    }
    trainee.train(was_training)
    if not sums:
        return {}
    found = {category: _acceptance(each) for category, each in sums.items()}
    return found | {ALL: _acceptance(torch.stack(list(sums.values())).sum(0))}


def _acceptance(sums: Tensor) -> Acceptance:
    """Of what `_counted` counts."""
    reached, kept, overlaps = sums.tolist()
    return Acceptance(
        tuple(own / max(of, 1) for own, of in zip(kept, reached, strict=True)),
        tuple(own / max(of, 1) for own, of in zip(overlaps, reached, strict=True)),
        int(reached[0]),
    )


def _counted(
    trainee: Trainee, entries: Sequence[Entry], longest: int, device: str, num_depths: int
) -> Tensor:
    """Drafts that were kept so far, that were also kept here, and overlaps `[3, depths]`."""
    sums = torch.zeros(3, num_depths, dtype=torch.float64)
    for batch in _batches(entries, longest, device):
        alive = batch.asked(0)
        for depth, states in enumerate(trainee.states(batch, num_depths)):
            asked = batch.asked(depth)
            alive = alive[:, : asked.shape[1]] & asked
            right, overlap = _drafted(trainee, batch, states, depth, alive)
            sums[:, depth] += torch.stack([alive.sum(), right.sum(), overlap.sum()]).cpu()
            alive = alive.masked_scatter(alive, right)
    return sums


def _drafted(
    trainee: Trainee, batch: Batch, states: Tensor, depth: int, alive: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the drafts that are alive: whether the next token is right, and the overlap there."""
    logits = trainee.logits(states[alive], depth)
    token_ids = trainee.teacher.token_ids[logits.argmax(-1)]
    right = token_ids == batch.token_ids[:, 2 + depth :][alive]
    wanted = trainee.wanted(batch, depth, alive)
    overlap = torch.minimum(logits.softmax(-1), wanted.softmax(-1)).sum(-1)
    return right, overlap


def _batches(entries: Sequence[Entry], longest: int, device: str) -> Iterator[Batch]:
    batches = Batches(entries, longest=longest)
    for index in range(len(batches)):
        yield Batch(**{name: each.to(device) for name, each in batches[index].items()})
