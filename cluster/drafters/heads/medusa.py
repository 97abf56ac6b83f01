"""Medusa heads (arXiv:2401.10774): one head for each position after the next token.

Head i reads the hidden state of the last position that is computed, n - 2 of n tokens, and says
what stands at n + i. Each is a number of residual blocks `x + silu(W x + b)`, then a linear of the
target's vocabulary. They do not know of one another's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from cluster.drafters.heads.checkpoint import HeadWeights, positive, read_config
from cluster.drafters.heads.model import Known
from cluster.models.hidden import HiddenWanted
from cluster.models.linear import Linear, at_least_two, linear_for
from cluster.models.load import DTYPES
from cluster.models.spec import ModelSpec

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
RENAMED = {"medusa_head.": "", "medusa_heads.": ""}


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One position's: residual blocks, then the vocabulary."""

    blocks: tuple[Linear, ...]
    vocabulary: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`, float32."""
        rows = at_least_two(hidden)
        for block in self.blocks:
            rows = rows + functional.silu(block(rows))
        return self.vocabulary(rows)[: len(hidden)].float()


class MedusaHeads:
    """All positions' heads, as a `Head`."""

    def __init__(
        self, heads: Sequence[MedusaHead], *, num_sequences: int, context_limit: int
    ) -> None:
        self._heads = tuple(heads)
        self._context_limit = context_limit
        self._num_sequences = num_sequences

    @property
    def wanted(self) -> HiddenWanted:
        """The last state after the final norm."""
        return HiddenWanted(num_sequences=self._num_sequences, num_rows=1)

    @property
    def context_limit(self) -> int:
        """The target's own: no head holds anything of the context."""
        return self._context_limit

    @property
    def max_draft(self) -> int:
        """The number of heads."""
        return len(self._heads)

    def begin(self, sequences: Sequence[Known]) -> Tensor:
        """The last hidden state of each, `[sequences, hidden]`."""
        return torch.cat([known.rows(known.stop - 1, known.stop) for known in sequences])

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """What head `depth` says."""
        return self._heads[depth](state)

    def follow(
        self, state: Tensor, slots: Sequence[int], positions: Sequence[int], drawn: Sequence[int]
    ) -> Tensor:
        """The same state: what was drawn is no head's business."""
        del slots, positions, drawn
        return state


def load_medusa(
    folder: Path,
    target: ModelSpec,
    *,
    dtype: str,
    device: str,
    num_sequences: int,
    context_limit: int,
) -> MedusaHeads:
    """Heads as published: config.json and medusa_lm_head, safetensors or pickled.

    Raises ConfigurationError when the config makes no sense or a shape is not the target's.
    """
    num_heads, num_layers = _sizes(folder)
    make_linear = linear_for(device, dtype)
    weights = HeadWeights(folder, FILES, dtype=DTYPES[dtype], device=device, renamed=RENAMED)
    size = target.hidden_size

    def block(prefix: str) -> Linear:
        bias = None
        if prefix + "linear.bias" in weights:
            bias = weights.take(prefix + "linear.bias", (size,))
        return make_linear(weights.take(prefix + "linear.weight", (size, size)), bias)

    heads = [
        MedusaHead(
            tuple(block(f"{head}.{layer}.") for layer in range(num_layers)),
            make_linear(
                weights.take(f"{head}.{num_layers}.weight", (target.vocab_size, size)), None
            ),
        )
        for head in range(num_heads)
    ]
    return MedusaHeads(heads, num_sequences=num_sequences, context_limit=context_limit)


def _sizes(folder: Path) -> tuple[int, int]:
    """Number of heads, and of residual blocks in each."""
    config = read_config(folder)
    return (
        positive(config, "medusa_num_heads", 0, folder=folder),
        positive(config, "medusa_num_layers", 1, folder=folder),
    )
