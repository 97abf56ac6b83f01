"""The ratio rule: each draft is kept with just the probability that makes it the target's sample.

Speculative sampling (Leviathan, Kalman and Matias, 2211.17192; Chen et al., 2302.01318). A draft d
that was drawn from `draft_probs` is kept with probability min(1, target_probs[d] / draft_probs[d]);
in place of one that is not, a token is drawn from the residual, max(target_probs - draft_probs, 0)
made to sum to 1. After drafts that are all kept comes a bonus token of the target's. What is
emitted then follows the target, whatever the drafter: for every token x

    draft_probs[x] * keep(x) + sum over d of draft_probs[d] * (1 - keep(d)) * residual[x]
        = min(target_probs[x], draft_probs[x]) + max(target_probs[x] - draft_probs[x], 0)
        = target_probs[x]

This holds on two conditions, which are the caller's to keep: a draft was drawn from the very
distribution that came with it, and with noise that neither the acceptance nor the residual uses.
Drawing, keeping, replacing and the bonus have streams of their own. Nor may a draft be left out
because of which token it is; where a draft ends may only depend on the tokens before that place.

Four cases at the edge:

- A draft that is certain (no distribution: n-gram) has draft_probs 1 at itself. Then the equation
  holds for each draft by itself, so it need not have been drawn in any way at all.
- A draft that is not in its own distribution was not drawn from it. It says nothing, so the token
  is drawn from the target as if there were no draft. The residual would be wrong here: it makes up
  for drafts that were kept too often, and it was not from them that this one came.
- A residual without mass (both distributions equal up to rounding) is never asked for but by
  rounding, and the target's own distribution takes its place.
- Where the target has no probability at all (a grammar or banned words left nothing) nothing is
  emitted. A draft that leads there is kept as often as any other, else those that do not would
  come too often; it is the last token then.

All in float64. A token is drawn by inverting the cumulative sum, and one without a probability can
never come out.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum

import torch
from torch import Tensor

from cluster.messages import DraftDistribution
from cluster.sampling.noise import Stream, number

NUM_SHIPPED = 64  # tokens of a draft's distribution; the rest of its mass is given up


@dataclass(frozen=True, slots=True)
class RatioNoise:
    """The uniform numbers of one verification, each in (0, 1): one per draft, and the bonus'."""

    acceptance: Sequence[float]
    residual: Sequence[float]
    bonus: float


@dataclass(frozen=True, slots=True)
class DrawnDraft:
    """A drafted token and the distribution it was drawn from; None where it is certain.

    `margin` is by how much the best processed logit led the second best before the draw.
    """

    token_id: int
    distribution: DraftDistribution | None = None
    margin: float = 0.0


def verify_ratio(
    target_probs: Tensor,
    draft_token_ids: Sequence[int],
    distributions: Sequence[DraftDistribution],
    *,
    seed: int,
    positions: Sequence[int],
) -> list[int]:
    """The emitted tokens: the drafts that are kept, then the recovered or the bonus token.

    There is none after the drafts where the target leaves nothing to draw: the list may be empty.
    `target_probs` is `[k + 1, vocab]` float64: what each row is to be drawn from, row i after the
    first i drafts. `distributions` has one entry per draft, or none where all are certain.
    `positions` are absolute, those of the k + 1 drawn tokens. Raises ValueError when these do not
    fit together.
    """
    if len(positions) != len(draft_token_ids) + 1:
        message = f"{len(draft_token_ids)} drafts stand at {len(positions)} positions"
        raise ValueError(message)
    noise = RatioNoise(
        acceptance=[number(seed, position, Stream.ACCEPTANCE) for position in positions[:-1]],
        residual=[number(seed, position, Stream.RESIDUAL) for position in positions[:-1]],
        bonus=number(seed, positions[-1], Stream.BONUS),
    )
    return emitted(target_probs, draft_token_ids, distributions, noise)


def emitted(
    target_probs: Tensor,
    draft_token_ids: Sequence[int],
    distributions: Sequence[DraftDistribution],
    noise: RatioNoise,
) -> list[int]:
    """As `verify_ratio`, a function of the noise: all the randomness there is."""
    num_drafts = len(draft_token_ids)
    if len(target_probs) != num_drafts + 1 or len(distributions) not in (0, num_drafts):
        message = f"{len(target_probs)} rows and {len(distributions)} distributions "
        raise ValueError(message + f"for {num_drafts} drafts")
    known = distributions or [_certain(token_id) for token_id in draft_token_ids]
    target = _gathered(target_probs, draft_token_ids)
    for row, (token_id, distribution) in enumerate(zip(draft_token_ids, known, strict=True)):
        keep = keep_probability(target[row], _probability(distribution, token_id))
        if noise.acceptance[row] >= keep:
            residual = residual_weights(target_probs[row], token_id, distribution)
            return [*draft_token_ids[:row], *drawn(residual, noise.residual[row])]
    return [*draft_token_ids, *drawn(target_probs[-1], noise.bonus)]


def keep_probability(target_prob: float, draft_prob: float) -> float:
    """With what probability a draft is kept; 0 for one outside its own distribution."""
    return min(1.0, target_prob / draft_prob) if draft_prob > 0 else 0.0


def residual_weights(
    target_probs: Tensor, draft_token_id: int, distribution: DraftDistribution
) -> Tensor:
    """What the token in place of a rejected draft is drawn from: `[vocab]`, of any positive sum."""
    if _probability(distribution, draft_token_id) <= 0:
        return target_probs
    device = target_probs.device
    token_ids = torch.tensor(distribution.token_ids, dtype=torch.int64, device=device)
    draft_probs = torch.tensor(distribution.probabilities, dtype=torch.float64, device=device)
    residual = target_probs.clone()
    residual[token_ids] = (residual[token_ids] - draft_probs).clamp(min=0.0)
    return residual if float(residual.amax()) > 0 else target_probs


def drawn(weights: Tensor, where: float) -> list[int]:
    """The one token at `where`, in (0, 1), of the cumulative weights `[vocab]`; none of nothing."""
    mass = weights.cumsum(-1)
    total = float(mass[-1])
    if total <= 0:
        return []
    token_id = min(int(torch.searchsorted(mass, where * total, right=True)), len(mass) - 1)
    if float(weights[token_id]) > 0:
        return [token_id]
    # One sum after the other cannot come here: it is level at a token without weight. Sums made in
    # parallel (CUDA) are level but for rounding, and may once in 2**50 draws.
    return [int(weights.argmax())]


def draw_drafts(
    draft_probs: Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    num_shipped: int = NUM_SHIPPED,
) -> list[DrawnDraft | None]:
    """One token a row from its most probable `num_shipped`, with just what it was drawn from.

    `draft_probs` is `[rows, vocab]`; a row without any probability gets None. `positions` are
    absolute: where the drafts will stand.
    """
    best = draft_probs.topk(min(num_shipped, draft_probs.shape[-1]), dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), seeds, positions, strict=True)
    return [
        _draft(token_ids, weights, number(seed, position, Stream.DRAFT))
        for token_ids, weights, seed, position in rows
    ]


def _draft(token_ids: Sequence[int], weights: Sequence[float], where: float) -> DrawnDraft | None:
    """Make weights a distribution, then draw from its very floats."""
    kept = [pair for pair in zip(token_ids, weights, strict=True) if pair[1] > 0]
    if not kept:
        return None
    total = fsum(weight for _, weight in kept)
    distribution = DraftDistribution(
        tuple(token_id for token_id, _ in kept), tuple(weight / total for _, weight in kept)
    )
    mass = list(accumulate(distribution.probabilities))
    place = min(bisect_right(mass, where * mass[-1]), len(mass) - 1)
    return DrawnDraft(distribution.token_ids[place], distribution)


def _certain(token_id: int) -> DraftDistribution:
    return DraftDistribution((token_id,), (1.0,))


def _probability(distribution: DraftDistribution, token_id: int) -> float:
    for known, probability in zip(distribution.token_ids, distribution.probabilities, strict=True):
        if known == token_id:
            return probability
    return 0.0


def _gathered(target_probs: Tensor, token_ids: Sequence[int]) -> list[float]:
    """The target's probability of each draft."""
    column = torch.tensor(token_ids, dtype=torch.int64, device=target_probs.device).unsqueeze(-1)
    return [float(each) for each in target_probs[:-1].gather(-1, column).flatten().tolist()]
