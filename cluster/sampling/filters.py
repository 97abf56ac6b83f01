"""From processed logits to the distribution a token is drawn from, each row by its own spec.

The order is fixed: temperature, top-k, top-p, min-p. Tokens are ranked by falling logit, equal ones
by rising id, and every filter keeps a prefix of that ranking:

- top-k keeps the first k;
- top-p keeps the shortest prefix whose share of what top-k kept reaches p;
- min-p keeps what is at least min_p times as probable as the first.

So all three together keep the shortest of their prefixes, and never less than one token.

A row's result never depends on the other rows. On CPU a sum or logsumexp over one long row is
split over threads while over several rows it is not, so neither is used here: log_softmax, topk,
sort, cumsum and the elementwise operations treat each row alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.messages import SamplingSpec

COLUMN_LENGTH = 16
MANY_PER_RANK = 4
SOME_RANKS = 2048  # of a row, found many times sooner than all are put in order


def tempered(logits: Tensor, specs: Sequence[SamplingSpec]) -> Tensor:
    """Natural log-probabilities at each row's temperature, which is over 0: `[rows, vocab]`.

    The best logit is taken off first, so that no temperature however small can overflow. A row of
    -inf alone stays one.
    """
    smallest = torch.finfo(logits.dtype).tiny
    temperatures = torch.tensor(
        [max(spec.temperature, smallest) for spec in specs],
        dtype=logits.dtype,
        device=logits.device,
    )
    best = logits.amax(-1, keepdim=True)
    log_probs = (logits - best).div_(temperatures.unsqueeze(-1)).log_softmax(-1)
    impossible = best == -torch.inf
    return log_probs.masked_fill_(impossible, -torch.inf) if impossible.any() else log_probs


def rank(logits: Tensor, depth: int) -> Tensor:
    """The ids of the `depth` best tokens of each row, equal ones by rising id: `[rows, depth]`.

    Logits, not log-probs: rounding can make two log-probs equal whose logits are not.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(np.stack([_best_ids(row, depth) for row in logits.numpy()]))
    return rank_anywhere(logits, depth)


def rank_anywhere(logits: Tensor, depth: int) -> Tensor:
    """As `rank`, on any device. On a CPU NumPy is several times faster than torch."""
    if depth >= logits.shape[-1]:
        return logits.sort(dim=-1, descending=True, stable=True).indices
    values, token_ids = logits.topk(depth + 1, dim=-1)
    cut_through_a_tie = values[:, depth - 1] == values[:, depth]
    token_ids = token_ids[:, :depth]
    for row in cut_through_a_tie.nonzero().flatten().tolist():
        above = (logits[row] > values[row, depth]).nonzero().flatten()
        level = (logits[row] == values[row, depth]).nonzero().flatten()
        token_ids[row] = torch.cat([above, level[: depth - len(above)]])
    token_ids = token_ids.sort(dim=-1).values
    order = logits.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True).indices
    return token_ids.gather(-1, order)


def kept_sizes(
    log_probs: Tensor, specs: Sequence[SamplingSpec], vocab_size: int
) -> list[int | None]:
    """How many ranks of each row its filters keep; None where it takes more ranks to say.

    `log_probs` are the tempered ones of the best tokens, best first: `[rows, depth]`.
    """
    sizes, undecided = _sizes(log_probs, specs, vocab_size)
    return [
        None if unknown else int(size)
        for unknown, size in zip(undecided.tolist(), sizes.tolist(), strict=True)
    ]


def kept_mask(logits: Tensor, log_probs: Tensor, spec: SamplingSpec) -> Tensor:
    """What the filters keep of one whole row, `[vocab]`, however deep they reach."""
    ranked = rank(logits.unsqueeze(0), min(SOME_RANKS, len(logits)))
    [size] = kept_sizes(log_probs.unsqueeze(0).gather(-1, ranked), [spec], len(logits))
    if size is not None and size <= ranked.shape[-1]:
        return torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, ranked[0, :size], True)
    # Falls as the logits do: each step from them to log-probs is monotone.
    ordered = _falling(log_probs).unsqueeze(0)
    size = int(_sizes(ordered, [spec], len(logits))[0])
    threshold = _falling(logits)[size - 1]
    kept = logits >= threshold
    if surplus := int(kept.sum()) - size:
        level = (logits == threshold).nonzero().flatten()
        kept[level[-surplus:]] = False
    return kept


def _sizes(
    log_probs: Tensor, specs: Sequence[SamplingSpec], vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Kept ranks of each row, and whether more than the ranks given could change that number."""
    log_probs = log_probs.double()
    depth, device = log_probs.shape[-1], log_probs.device
    top_k = torch.tensor([spec.top_k or vocab_size for spec in specs], device=device)
    top_k = top_k.clamp(max=vocab_size)
    top_p = torch.tensor([spec.top_p for spec in specs], dtype=torch.float64, device=device)
    min_p = torch.tensor([spec.min_p for spec in specs], dtype=torch.float64, device=device)

    mass = log_probs.exp().cumsum(-1)
    mass_of_top_k = mass.gather(-1, (top_k.clamp(max=depth) - 1).unsqueeze(-1)).squeeze(-1)
    total = torch.where(top_k < vocab_size, mass_of_top_k, 1.0)
    below = torch.searchsorted(mass, (top_p * total).unsqueeze(-1)).squeeze(-1)
    in_top_p = torch.where(top_p < 1, below + 1, vocab_size)
    least = log_probs[:, :1] + min_p.log().unsqueeze(-1)
    at_least = torch.searchsorted(-log_probs, -least, right=True).squeeze(-1)
    in_min_p = torch.where(min_p > 0, at_least, vocab_size)
    sizes = torch.minimum(torch.minimum(in_top_p, in_min_p), top_k)

    total_unknown = (top_p < 1) & (top_k > depth) & (top_k < vocab_size)
    may_keep_more = ((top_p < 1) & (in_top_p > depth)) | ((min_p > 0) & (in_min_p == depth))
    undecided = total_unknown | (may_keep_more & (sizes >= depth) & (top_k > depth))
    return sizes, undecided & (depth < vocab_size)


def _best_ids(logits: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
    """The ranking of one row.

    Of a row cut into columns, at least `depth` values reach what `depth` of the columns' largest
    reach. That leaves few to sort, unless many are level (forbidden tokens are).
    """
    num_columns = len(logits) // COLUMN_LENGTH
    if num_columns < depth:
        return np.argsort(-logits, kind="stable")[:depth]
    columns = logits[: num_columns * COLUMN_LENGTH].reshape(COLUMN_LENGTH, num_columns)
    least = np.partition(columns.max(0), -depth)[-depth]
    token_ids = np.flatnonzero(logits >= least)
    if len(token_ids) > MANY_PER_RANK * depth:
        level = np.flatnonzero(logits == least)[:depth]
        token_ids = np.concatenate([np.flatnonzero(logits > least), level])
    best = np.argsort(-logits[token_ids], kind="stable")[:depth]
    return token_ids[best]


def _falling(values: Tensor) -> Tensor:
    """The values in falling order. On a CPU NumPy sorts them many times faster than torch."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy())).flip(0)
    return values.sort(descending=True).values
