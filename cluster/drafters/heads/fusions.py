"""The two versions of EAGLE: what is fused into the layer, and how tokens come out of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.models.linear import Linear, at_least_two
from cluster.models.pointwise import rms_norm

Embed = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Fusion:
    """Embedding and state side by side through one linear; the target's own head."""

    embed: Embed
    fc: Linear
    head: Callable[[Tensor], Tensor]

    @property
    def layers(self) -> tuple[int, ...]:
        """None: it reads the state after the final norm."""
        return ()

    def features(self, rows: Tensor) -> Tensor:
        """The rows as they are: the layer's own are guesses at just these."""
        return rows

    def inputs(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Twice the fused rows: there is no norm before this layer."""
        fused = self.fc(torch.cat([self.embed(token_ids), features], dim=-1))
        return fused, fused

    def logits(self, features: Tensor) -> Tensor:
        """The target's head of what should be the target's state."""
        return self.head(features)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Fusion:
    """Several layers' states through one linear, once; embedding and state normed side by side.

    `token_ids` are the target's ids of the head's own, smaller vocabulary, None where that is the
    target's. With `norms_residual` the layer's attention is added to the normed state.
    """

    layers: tuple[int, ...]
    embed: Embed
    fc: Linear
    embedding_norm: Tensor
    hidden_norm: Tensor
    final_norm: Tensor
    head: Linear
    token_ids: Tensor | None
    vocab_size: int
    epsilon: float
    norms_residual: bool

    def features(self, rows: Tensor) -> Tensor:
        """Low, middle and high states fused."""
        return self.fc(at_least_two(rows))[: len(rows)]

    def inputs(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and state, each under its norm; and the state."""
        embedded = rms_norm(self.embed(token_ids), self.embedding_norm, self.epsilon)
        normed = rms_norm(features, self.hidden_norm, self.epsilon)
        residual = normed if self.norms_residual else features
        return torch.cat([embedded, normed], dim=-1), residual

    def logits(self, features: Tensor) -> Tensor:
        """Minus infinity for what is not in the head's vocabulary."""
        normed = rms_norm(at_least_two(features), self.final_norm, self.epsilon)
        own = self.head(normed)[: len(features)].float()
        if self.token_ids is None:
            return own
        logits = own.new_full((len(own), self.vocab_size), -torch.inf)
        return logits.index_copy_(1, self.token_ids, own)
