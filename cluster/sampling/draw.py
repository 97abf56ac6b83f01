"""One token per row, by Gumbel noise that depends on seed, position and token id alone.

`argmax(log-prob + Gumbel noise)` is an exact sample of the distribution. Noise for a whole
vocabulary would cost milliseconds a row, so only the most probable tokens get their own; all others
share one bucket, whose log-prob is the logsumexp of theirs. When that bucket wins, a second
draw with noise of its own chooses inside it. By the Gumbel-max trick over groups (Maddison, Tarlow
and Minka, "A* sampling", 2014) the two stages together are exact, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.messages import SamplingSpec
from cluster.sampling.noise import Stream, gumbel, row_keys
from cluster.sampling.processors import Ranking, kept_sizes, rank, suppress, tempered

NUM_INDIVIDUAL = 256  # changing it changes what a seed draws
_DEEPER = 16  # a filter that reaches beyond the individual tokens is first sought this much deeper
_ELEMENTS_AT_ONCE = 2**20  # bounds the memory of noise over whole vocabularies


def sample(
    logits: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    *,
    num_individual: int = NUM_INDIVIDUAL,
) -> list[int]:
    """One token id per row of `logits` (`[rows, vocab]` float32), by that row's spec.

    `positions` are absolute: where in the sequence the drawn token will stand. A row's token
    depends on its logits, spec and position only. Temperature 0 is argmax, lowest id on a tie.
    """
    logits = suppress(logits, specs, positions)
    random_rows = [row for row, spec in enumerate(specs) if spec.temperature > 0]
    if not random_rows:
        return _ints(logits.argmax(-1))
    if len(random_rows) == len(specs):
        return _draw(tempered(logits, specs), specs, positions, num_individual)
    token_ids = [0] * len(specs)
    greedy_rows = [row for row, spec in enumerate(specs) if spec.temperature <= 0]
    for row, token_id in zip(greedy_rows, _ints(logits[greedy_rows].argmax(-1)), strict=True):
        token_ids[row] = token_id
    random_specs = [specs[row] for row in random_rows]
    drawn = _draw(
        tempered(logits[random_rows], random_specs),
        random_specs,
        [positions[row] for row in random_rows],
        num_individual,
    )
    for row, token_id in zip(random_rows, drawn, strict=True):
        token_ids[row] = token_id
    return token_ids


def token_log_probs(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Natural log of the unprocessed probability of one token per row of `logits`."""
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    return [float(value) for value in logits.log_softmax(-1).gather(-1, chosen).flatten().tolist()]


def _draw(
    log_probs: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    num_individual: int,
) -> list[int]:
    """The filters and the two stages, over rows of tempered log-probs."""
    seeds = [spec.seed for spec in specs]
    device = log_probs.device
    ranking = rank(log_probs, num_individual)
    depth = ranking.token_ids.shape[-1]
    rest_rows, rest, sizes = _remainder(log_probs, ranking, specs)

    scores = ranking.log_probs + gumbel(
        row_keys(seeds, positions, Stream.TOKEN, device), ranking.token_ids
    )
    beyond = torch.arange(depth, device=device) >= torch.tensor(sizes, device=device).unsqueeze(-1)
    scores = scores.masked_fill(beyond, -torch.inf)
    if not rest_rows:
        return _ints(ranking.token_ids.gather(-1, scores.argmax(-1, keepdim=True)))

    rest_scores = torch.full_like(scores[:, :1], -torch.inf)
    rest_scores[rest_rows] = _log_mass(rest) + gumbel(
        row_keys(
            [seeds[row] for row in rest_rows],
            [positions[row] for row in rest_rows],
            Stream.REST,
            device,
        ),
        torch.zeros(len(rest_rows), 1, dtype=torch.int64, device=device),
    )
    winners = torch.cat([scores, rest_scores], dim=-1).argmax(-1)
    chosen = ranking.token_ids.gather(-1, winners.clamp(max=depth - 1).unsqueeze(-1))
    token_ids = _ints(chosen)
    won = [index for index, row in enumerate(rest_rows) if int(winners[row]) == depth]
    won_rows = [rest_rows[index] for index in won]
    keys = row_keys(
        [seeds[row] for row in won_rows],
        [positions[row] for row in won_rows],
        Stream.WITHIN_REST,
        device,
    )
    for row, token_id in zip(won_rows, _draw_within(rest[won], keys), strict=True):
        token_ids[row] = token_id
    return token_ids


def _remainder(
    log_probs: Tensor, ranking: Ranking, specs: Sequence[SamplingSpec]
) -> tuple[list[int], Tensor, list[int]]:
    """What the filters keep beyond the ranking.

    Returns the rows that keep something there, their log-probs (`[len(rows), vocab]`, -inf for
    all but the remainder), and how many ranks every row keeps in all.
    """
    vocab_size = log_probs.shape[-1]
    depth = ranking.token_ids.shape[-1]
    sizes: list[int] = []
    remainders: dict[int, Tensor] = {}
    for row, size in enumerate(kept_sizes(ranking, specs, vocab_size)):
        if size is None or depth < size < vocab_size:
            kept = _kept_ids(log_probs[row : row + 1], specs[row], depth * _DEEPER)
            sizes.append(len(kept))
            if len(kept) > depth:
                remainder = torch.full_like(log_probs[row], -torch.inf)
                remainder[kept[depth:]] = log_probs[row, kept[depth:]]
                remainders[row] = remainder
        else:
            sizes.append(size)
    rest_rows = [row for row, size in enumerate(sizes) if size > depth]
    rest = log_probs[rest_rows].scatter(-1, ranking.token_ids[rest_rows], -torch.inf)
    for index, row in enumerate(rest_rows):
        if row in remainders:
            rest[index] = remainders[row]
    return rest_rows, rest, sizes


def _kept_ids(log_probs: Tensor, spec: SamplingSpec, depth: int) -> Tensor:
    """The ids one row's filters keep, by rank, looking as deep as it takes. `[1, vocab]` in."""
    vocab_size = log_probs.shape[-1]
    ranking = rank(log_probs, min(depth, vocab_size))
    size = kept_sizes(ranking, [spec], vocab_size)[0]
    if size is None or size > ranking.token_ids.shape[-1]:
        return _kept_ids(log_probs, spec, vocab_size)
    return ranking.token_ids[0, :size]


def _log_mass(log_probs: Tensor) -> Tensor:
    """The logsumexp of each row, `[rows, 1]`, from log_softmax because that is row by row."""
    best = log_probs.amax(-1, keepdim=True)
    log_mass = best - log_probs.log_softmax(-1).amax(-1, keepdim=True)
    return torch.where(best == -torch.inf, best, log_mass).double()


def _draw_within(log_probs: Tensor, keys: Tensor) -> list[int]:
    """One token per row, with noise of its own for every entry of the vocabulary."""
    num_rows, vocab_size = log_probs.shape
    all_ids = torch.arange(vocab_size, device=log_probs.device).unsqueeze(0)
    at_once = max(1, _ELEMENTS_AT_ONCE // vocab_size)
    drawn: list[int] = []
    for first in range(0, num_rows, at_once):
        rows = slice(first, first + at_once)
        drawn += _ints((log_probs[rows] + gumbel(keys[rows], all_ids)).argmax(-1))
    return drawn


def _ints(token_ids: Tensor) -> list[int]:
    return [int(token_id) for token_id in token_ids.flatten().tolist()]
