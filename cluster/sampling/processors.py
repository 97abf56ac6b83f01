"""What a spec does to a row's logits before the temperature, each row by its own.

The order is fixed: `logit_bias`, then penalties (`penalties`), then everything that forbids: what a
grammar does not allow, what is not among the allowed ids, banned ids, what would complete a banned
sequence, and the ids that `min_tokens` holds back. Then follow temperature, top-k, top-p and min-p
(`filters`), and the draw (`draw`).

Every entry is computed by itself, so a row's result never depends on the other rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from cluster.messages import SamplingSpec
from cluster.sampling.penalties import penalize

T = TypeVar("T")
Histories = Sequence[Sequence[int]]


def processed(
    logits: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    *,
    histories: Histories | None = None,
    masks: Tensor | None = None,
) -> Tensor:
    """Logits `[rows, vocab]` after all that comes before the temperature, -inf where forbidden.

    `positions` are absolute: where in the sequence the drawn token will stand. `histories[row]`
    are all token ids before it, needed where the spec `needs_history`. `masks` is bool
    `[rows, vocab]`, True where a grammar allows. Ids beyond the vocabulary are without effect, so
    a model of fewer tokens can take the specs of another.

    The input is left alone, and returned itself when there is nothing to do. Raises ValueError
    when a history is missing.
    """
    groups = [rows for rows in _groups(specs) if _changes(specs[rows[0]], _part(positions, rows))]
    if not groups and masks is None:
        return logits
    logits = logits.clone()
    for rows in groups:
        spec, own = specs[rows[0]], logits[rows.start : rows.stop]
        _bias(own, spec)
        if spec.needs_history:
            if histories is None:
                raise ValueError("a spec that looks back needs histories")
            penalize(own, spec, _part(histories, rows))
            _forbid_completions(own, spec, _part(histories, rows))
        _forbid(own, spec, _part(positions, rows))
    return logits if masks is None else logits.masked_fill_(~masks, -torch.inf)


def drawable(
    logits: Tensor, specs: Sequence[SamplingSpec], masks: Tensor | None = None
) -> list[bool]:
    """Whether each row of processed logits has any token left to draw.

    Rows from which nothing can have been taken are not looked at.
    """
    found = [True] * len(specs)
    rows = [row for row, spec in enumerate(specs) if masks is not None or _forbids(spec)]
    if rows:
        best = logits[rows].amax(-1).tolist()
        for row, value in zip(rows, best, strict=True):
            found[row] = value > -torch.inf
    return found


def _groups(specs: Sequence[SamplingSpec]) -> list[range]:
    """Neighbouring rows of one and the same spec, mostly those of one sequence."""
    starts = [row for row, spec in enumerate(specs) if row == 0 or spec is not specs[row - 1]]
    return [range(*ends) for ends in pairwise([*starts, len(specs)])]


def _part(values: Sequence[T], rows: range) -> Sequence[T]:
    return values[rows.start : rows.stop]


def _changes(spec: SamplingSpec, positions: Sequence[int]) -> bool:
    """Whether any logit of the rows may change. Cheap, since it is asked of every sequence."""
    return bool(
        spec.logit_bias
        or spec.needs_history
        or spec.allowed_token_ids is not None
        or spec.banned_token_ids
        or (spec.suppressed_before and min(positions) < spec.suppressed_before)
    )


def _forbids(spec: SamplingSpec) -> bool:
    return bool(
        spec.allowed_token_ids is not None
        or spec.banned_token_ids
        or spec.banned_sequences
        or spec.suppressed_before
    )


def _bias(logits: Tensor, spec: SamplingSpec) -> None:
    """Add the biases, in place: `[rows, vocab]` of one spec."""
    if spec.logit_bias:
        token_ids, values = _known_biases(spec.logit_bias, logits.shape[-1], logits.device)
        places = token_ids.expand(len(logits), -1)
        logits.scatter_add_(1, places, values.to(logits.dtype).expand(len(logits), -1))


def _forbid(logits: Tensor, spec: SamplingSpec, positions: Sequence[int]) -> None:
    """Leave only allowed ids, without those banned or held back, in place."""
    size, device = logits.shape[-1], logits.device
    if spec.allowed_token_ids is not None:
        logits.masked_fill_(_all_but(spec.allowed_token_ids, size, device), -torch.inf)
    if spec.banned_token_ids:
        banned = _known_ids(spec.banned_token_ids, size, device)
        logits.scatter_(1, banned.expand(len(logits), -1), -torch.inf)
    held = [row for row, position in enumerate(positions) if position < spec.suppressed_before]
    if held:
        suppressed = _known_ids(spec.suppressed_token_ids, size, device)
        rows = torch.tensor(held, device=device).unsqueeze(-1)
        logits[rows, suppressed] = -torch.inf


def _forbid_completions(logits: Tensor, spec: SamplingSpec, histories: Histories) -> None:
    """Forbid the last token of every banned sequence whose other tokens a history ends with."""
    for row, history in enumerate(histories):
        last = [
            sequence[-1]
            for sequence in spec.banned_sequences
            if _ends_with(history, sequence[:-1]) and sequence[-1] < logits.shape[-1]
        ]
        if last:
            logits[row, torch.tensor(last, device=logits.device)] = -torch.inf


def _ends_with(history: Sequence[int], token_ids: tuple[int, ...]) -> bool:
    if len(token_ids) > len(history) or history[-1] != token_ids[-1]:
        return False
    return tuple(history[len(history) - len(token_ids) :]) == token_ids


# A sequence asks for the same at every step, so what is made of its ids is kept for a while.


@lru_cache(maxsize=64)
def _known_ids(token_ids: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """The ids below `size`."""
    known = [token_id for token_id in token_ids if token_id < size]
    return torch.tensor(known, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _all_but(token_ids: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """True for the ids below `size` that are none of these: bool `[size]`."""
    others = torch.ones(size, dtype=torch.bool, device=device)
    others[_known_ids(token_ids, size, device)] = False
    return others


@lru_cache(maxsize=64)
def _known_biases(
    biases: tuple[tuple[int, float], ...], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The ids below `size`, and what is added to their logits."""
    known = [pair for pair in biases if pair[0] < size]
    return (
        torch.tensor([token_id for token_id, _ in known], dtype=torch.int64, device=device),
        torch.tensor([value for _, value in known], dtype=torch.float64, device=device),
    )
