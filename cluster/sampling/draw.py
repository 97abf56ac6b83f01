"""One token per row, by Gumbel noise that depends on seed, position and token id alone.

`argmax(log-prob + Gumbel noise)` is an exact sample of the distribution. Noise for a whole
vocabulary would cost milliseconds a row, so only the most probable tokens get their own; all others
share one bucket, whose log-prob is the logsumexp of theirs. When that bucket wins, a second
draw with noise of its own chooses inside it. By the Gumbel-max trick over groups (Maddison, Tarlow
and Minka, "A* sampling", 2014) the two stages together are exact, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.messages import SamplingSpec
from cluster.sampling.filters import kept_mask, kept_sizes, rank, tempered
from cluster.sampling.noise import Stream, gumbel, row_keys
from cluster.sampling.processors import Histories, processed

NUM_INDIVIDUAL = 256  # changing it changes what a seed draws
_ELEMENTS_AT_ONCE = 400_000  # on a CPU: what lies between logits and token stays in its cache


def sample(
    logits: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    *,
    histories: Histories | None = None,
    masks: Tensor | None = None,
    num_individual: int = NUM_INDIVIDUAL,
) -> list[int]:
    """One token id per row of `logits` (`[rows, vocab]` float32), by that row's spec.

    `positions` are absolute: where in the sequence the drawn token will stand. `histories` and
    `masks` are those of `processors.processed`. A row's token depends on its own logits, spec,
    position, history and mask only. Temperature 0 is argmax, lowest id on a tie. A row in which
    everything is forbidden draws some forbidden token: see `processors.drawable`.
    """
    logits = processed(logits, specs, positions, histories=histories, masks=masks)
    return draw(logits, specs, positions, num_individual=num_individual)


def draw(
    logits: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    *,
    num_individual: int = NUM_INDIVIDUAL,
) -> list[int]:
    """As `sample`, of logits that are `processed` already."""
    random_rows = [row for row, spec in enumerate(specs) if spec.temperature > 0]
    if not random_rows:
        return _best(logits)
    if len(random_rows) == len(specs):
        drawn: list[int] = []
        for part in _parts(logits):
            drawn += _draw(logits[part], specs[part], positions[part], num_individual)
        return drawn
    token_ids = [0] * len(specs)
    greedy_rows = [row for row, spec in enumerate(specs) if spec.temperature <= 0]
    for row, token_id in zip(greedy_rows, _best(logits[greedy_rows]), strict=True):
        token_ids[row] = token_id
    drawn = draw(
        logits[random_rows],
        [specs[row] for row in random_rows],
        [positions[row] for row in random_rows],
        num_individual=num_individual,
    )
    for row, token_id in zip(random_rows, drawn, strict=True):
        token_ids[row] = token_id
    return token_ids


def distribution(
    logits: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    *,
    histories: Histories | None = None,
    masks: Tensor | None = None,
    num_individual: int = NUM_INDIVIDUAL,
) -> Tensor:
    """What `sample` draws each row from: probabilities, `[rows, vocab]` float64.

    Temperature 0 has probability 1 at one token; a row in which all is forbidden has none at all.
    """
    logits = processed(logits, specs, positions, histories=histories, masks=masks)
    return probabilities(logits, specs, num_individual=num_individual)


def probabilities(
    logits: Tensor, specs: Sequence[SamplingSpec], *, num_individual: int = NUM_INDIVIDUAL
) -> Tensor:
    """As `distribution`, of logits that are `processed` already."""
    log_probs = tempered(logits, specs)
    ranked = rank(logits, num_individual)
    sizes, rest = _filter(logits, log_probs, ranked, specs)
    weights = log_probs.gather(-1, ranked).double().exp_()
    weights.masked_fill_(_beyond(ranked, sizes), 0.0)
    others = rest.log_probs.double().exp_()
    total = weights.cumsum(-1)[:, -1:].clone()
    total[rest.rows] += others.cumsum(-1)[:, -1:]
    total[total == 0] = 1.0  # everything is forbidden
    probs = torch.zeros_like(log_probs, dtype=torch.float64).scatter_(-1, ranked, weights / total)
    probs[rest.rows] += others / total[rest.rows]
    return probs


def rows_at_once(rows: Tensor) -> int:
    """How many rows of `[rows, vocab]` a CPU's caches hold; all of them elsewhere; at least 1."""
    num_rows, vocab_size = rows.shape
    at_once = _ELEMENTS_AT_ONCE // vocab_size if rows.device.type == "cpu" else num_rows
    return max(at_once, 1)


@dataclass(frozen=True, slots=True)
class _Rest:
    """What the filters keep beyond the individual tokens, for the rows that keep any there.

    `log_probs` is `[len(rows), vocab]`, -inf for every token that is not in the rest.
    """

    rows: list[int]
    log_probs: Tensor


def _draw(
    logits: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    num_individual: int,
) -> list[int]:
    """The filters and both stages, over rows that are all random."""
    device = logits.device
    log_probs = tempered(logits, specs)
    ranked = rank(logits, num_individual)
    depth = ranked.shape[-1]
    sizes, rest = _filter(logits, log_probs, ranked, specs)

    scores = log_probs.gather(-1, ranked) + gumbel(
        _keys(range(len(specs)), specs, positions, Stream.TOKEN, device), ranked
    )
    scores = scores.masked_fill(_beyond(ranked, sizes), -torch.inf)
    if not rest.rows:
        return _ints(ranked.gather(-1, scores.argmax(-1, keepdim=True)))

    rest_scores = torch.full_like(scores[:, :1], -torch.inf)
    rest_scores[rest.rows] = _log_mass(rest.log_probs) + gumbel(
        _keys(rest.rows, specs, positions, Stream.REST, device),
        torch.zeros(len(rest.rows), 1, dtype=torch.int64, device=device),
    )
    winners = torch.cat([scores, rest_scores], dim=-1).argmax(-1, keepdim=True)
    token_ids = _ints(ranked.gather(-1, winners.clamp(max=depth - 1)))
    rest_won = [index for index, row in enumerate(rest.rows) if int(winners[row]) == depth]
    rows = [rest.rows[index] for index in rest_won]
    keys = _keys(rows, specs, positions, Stream.WITHIN_REST, device)
    for row, token_id in zip(rows, _draw_within(rest.log_probs[rest_won], keys), strict=True):
        token_ids[row] = token_id
    return token_ids


def _keys(
    rows: Sequence[int],
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    stream: Stream,
    device: torch.device,
) -> Tensor:
    """The noise keys of some of the rows."""
    seeds = [specs[row].seed for row in rows]
    return row_keys(seeds, [positions[row] for row in rows], stream, device)


def _filter(
    logits: Tensor, log_probs: Tensor, ranked: Tensor, specs: Sequence[SamplingSpec]
) -> tuple[list[int], _Rest]:
    """How many ranks each row keeps, and what of them lies beyond `ranked`."""
    vocab_size, depth = logits.shape[-1], ranked.shape[-1]
    sizes: list[int] = []
    kept: dict[int, Tensor] = {}
    for row, size in enumerate(kept_sizes(log_probs.gather(-1, ranked), specs, vocab_size)):
        if specs[row].temperature <= 0:
            sizes.append(1)
        elif size is not None and (size <= depth or size == vocab_size):
            sizes.append(size)
        else:
            kept[row] = kept_mask(logits[row], log_probs[row], specs[row])
            sizes.append(int(kept[row].sum()))
    rows = [row for row, size in enumerate(sizes) if size > depth]
    rest = log_probs[rows].scatter_(-1, ranked[rows], -torch.inf)
    for index, row in enumerate(rows):
        if row in kept:
            rest[index].masked_fill_(~kept[row], -torch.inf)
    return sizes, _Rest(rows, rest)


def _beyond(ranked: Tensor, sizes: Sequence[int]) -> Tensor:
    """Which ranks of each row are filtered out, as bool in the shape of `ranked`."""
    kept = torch.tensor(sizes, device=ranked.device).unsqueeze(-1)
    return torch.arange(ranked.shape[-1], device=ranked.device) >= kept


def _log_mass(log_probs: Tensor) -> Tensor:
    """The logsumexp of each row, `[rows, 1]`, from log_softmax because that is row by row."""
    best = log_probs.amax(-1, keepdim=True)
    log_mass = best - log_probs.log_softmax(-1).amax(-1, keepdim=True)
    return torch.where(best == -torch.inf, best, log_mass).double()


def _draw_within(log_probs: Tensor, keys: Tensor) -> list[int]:
    """One token per row, with noise of its own for every entry of the vocabulary."""
    all_ids = torch.arange(log_probs.shape[-1], device=log_probs.device).unsqueeze(0)
    drawn: list[int] = []
    for part in _parts(log_probs):
        drawn += _ints((log_probs[part] + gumbel(keys[part], all_ids)).argmax(-1))
    return drawn


def _parts(rows: Tensor) -> list[slice]:
    """So many rows together as `rows_at_once` says."""
    at_once = rows_at_once(rows)
    return [slice(first, first + at_once) for first in range(0, len(rows), at_once)]


def _best(logits: Tensor) -> list[int]:
    """The best token of each row, lowest id on a tie. On a CPU NumPy is twenty times faster."""
    if logits.device.type == "cpu":
        return _ints(torch.from_numpy(logits.numpy().argmax(-1)))
    return _ints(logits.argmax(-1))


def _ints(token_ids: Tensor) -> list[int]:
    return [int(token_id) for token_id in token_ids.flatten().tolist()]
