"""What learns to draft, and what it learns from: the target's own distribution of each token."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cluster.models.pointwise import rms_norm
from cluster.tools.training.batches import Batch

FADING = 0.8  # weight of a draft's token to that of the one before: few drafts get there


class Teacher(nn.Module):
    """The target's head, of some tokens of its vocabulary; nothing of it is trained or saved."""

    norm: Tensor
    head: Tensor
    token_ids: Tensor

    def __init__(self, norm: Tensor, head: Tensor, token_ids: Tensor, *, epsilon: float) -> None:
        """`head` is `[len(token_ids), hidden]`."""
        super().__init__()
        self._epsilon = epsilon
        for name, tensor in (("norm", norm), ("head", head), ("token_ids", token_ids)):
            self.register_buffer(name, tensor, persistent=False)

    def states(self, hidden: Tensor) -> Tensor:
        """What goes into the head, of what comes out of the last layer."""
        return rms_norm(hidden, self.norm, self._epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of what comes out of the last layer."""
        return functional.linear(self.states(hidden), self.head)


class Trainee(nn.Module, ABC):
    """A drafter in the making.

    A batch's hidden states are those that the drafter reads, and last those of the target's last
    layer, which the teacher reads.
    """

    num_depths: int  # drafted tokens that are trained

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.teacher = teacher

    @abstractmethod
    def states(self, batch: Batch, num_depths: int) -> list[Tensor]:
        """Of each depth what its token is drawn from, by anchors (see `Batch.asked`).

        `[n, longest - 2 - depth, size]`; fewer than are asked for where it drafts no further.
        """

    @abstractmethod
    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Of the teacher's tokens."""

    @property
    @abstractmethod
    def weights_per_token(self) -> int:
        """Weights that each drafted token is multiplied with, once it is served."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """The result, as it is served."""

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override] # noqa: ANN401
        """What is trained, and nothing that the target has."""
        return {name: each for name, each in self.named_parameters() if each.requires_grad}

    def forward(self, **fields: Tensor) -> dict[str, Tensor]:
        """The loss of a batch's `fields`: of the tokens of all depths, early ones counting more."""
        batch = Batch(**fields)
        states = self.states(batch, self.num_depths)
        weights = torch.tensor([FADING**depth for depth in range(len(states))])
        losses = [self._loss(batch, each, depth) for depth, each in enumerate(states)]
        return {"loss": (torch.stack(losses) * weights.to(losses[0].device)).sum() / weights.sum()}

    def _loss(self, batch: Batch, states: Tensor, depth: int) -> Tensor:
        """Cross-entropy and total variation from the target's distribution to the drafter's.

        The one leads there from afar; the other is the share of drafts that are lost.
        """
        asked = batch.asked(depth)
        wanted = self.wanted(batch, depth, asked)
        logs = functional.log_softmax(self.logits(states[asked], depth), dim=-1)
        chances = functional.softmax(wanted, dim=-1)
        entropy = -(chances * logs).sum(-1)
        variation = (chances - logs.exp()).abs().sum(-1) / 2
        return (entropy + variation).mean() if len(wanted) else states.sum() * 0

    def wanted(self, batch: Batch, depth: int, asked: Tensor) -> Tensor:
        """The teacher's logits of the tokens asked for."""
        size = self.teacher.head.shape[1]
        with torch.no_grad():
            return self.teacher.logits(batch.hidden[:, 1 + depth : -1, -size:][asked])
