"""Natural logs of the target's own probabilities: of its logits as they were, unprocessed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.messages import TopLogprobs
from cluster.sampling.filters import rank


def token_log_probs(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """The logprob of one token per row of `logits`, `[rows, vocab]`."""
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    return [float(value) for value in logits.log_softmax(-1).gather(-1, chosen).flatten().tolist()]


def top_log_probs(logits: Tensor, count: int) -> list[TopLogprobs]:
    """The `count` most probable tokens of each row, best first, with their logprobs.

    Equal logits go by rising id. Fewer asked for are the first of more.
    """
    ranked = rank(logits, count)
    values = logits.log_softmax(-1).gather(-1, ranked)
    return [
        tuple(zip(*row, strict=True)) for row in zip(ranked.tolist(), values.tolist(), strict=True)
    ]
