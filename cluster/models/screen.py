"""Which token has the largest logit, without reading the whole head.

At few rows a head takes the time of reading its weights: a fifth of a step, where the vocabulary is
large. An int8 copy is read in a quarter of that, and how far its logits are off has a bound: by
Cauchy and Schwarz the length of what rounding took from a weight, times that of the row. Whatever
could still be the largest, some tens of tokens, is then computed as the head would, to the bit.

So the result is the head's own, and no approximation.
"""

import torch
from torch import Tensor

from cluster.models import compiled
from cluster.models.linear import rowwise_int8
from cluster.models.spec import ModelSpec

LEAST_VOCABULARY = 8192  # whose head takes long enough
MAX_ROWS = 8  # with more the head is as fast
MAX_CANDIDATES = 4096  # whose exact logits cost less than the head's


def is_screened(spec: ModelSpec, *, dtype: str, device: str) -> bool:
    """Whether a model's head gets a screen: where its weights are at hand, as the embedding's.

    And where inputs of an int8 product are not rounded, too.
    """
    return (
        spec.tied_head
        and spec.vocab_size >= LEAST_VOCABULARY
        and (torch.device(device).type, dtype) == ("cpu", "float32")
        and compiled.is_available()
    )


class Screen:
    """For a head of float32 weights `[vocab, hidden]`, on a CPU."""

    def __init__(self, weight: Tensor) -> None:
        levels, scales = rowwise_int8(weight)
        lost = (weight - levels * scales[:, None]).norm(dim=1)
        # Twice as far as one float32 sum of so many products can be off: for ours and the head's.
        rounding = weight.shape[1] * torch.finfo(weight.dtype).eps * weight.norm(dim=1)
        self._bounds = lost + rounding
        self._weight = weight.contiguous()
        self._coarse = compiled.CompiledInt8Linear(levels, scales, None)

    @torch.inference_mode()
    def largest(self, rows: Tensor) -> list[int] | None:
        """The token of the largest logit for each of `[rows, hidden]`, up to MAX_ROWS of them.

        None when that takes the head itself, as two equal ones do.
        """
        if len(rows) > MAX_ROWS:
            return None
        rows = rows.contiguous()
        lengths = rows.norm(dim=1)
        estimates = self._coarse(rows)
        found = compiled.candidates(estimates, self._bounds, lengths, most=MAX_CANDIDATES)
        if found is None:
            return None
        row, token = found
        logits = compiled.products(rows, row, self._weight, token)
        most = torch.full_like(lengths, -torch.inf).scatter_reduce_(0, row, logits, "amax")
        chosen: list[int] = token[logits == most[row]].tolist()
        return chosen if len(chosen) == len(rows) else None
