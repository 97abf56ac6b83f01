"""What a drafter draws: by the target's own noise, or from its own distribution, as the rule is."""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.messages import Rule, SamplingSpec
from cluster.sampling.draw import draw, probabilities
from cluster.sampling.processors import Histories, drawable, processed
from cluster.sampling.ratio import DrawnDraft, draw_drafts

T = TypeVar("T")

MAX_MARGIN = 64.0  # of a token without a rival


def propose(
    logits: Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    *,
    histories: Histories,
    rule: Rule,
) -> list[DrawnDraft | None]:
    """A draft per row of `logits` (`[rows, vocab]`); None where the spec leaves nothing to draw.

    Specs, positions and histories are those of `draw.sample`: all that shapes the target's
    distribution shapes the draft's. Under Rule.COUPLED a draft is what the target would draw from
    these logits. Under Rule.RATIO it comes with the distribution it was drawn from, by noise of
    its own; at temperature 0 it is certain.

    Margins are those of the processed logits, whatever the temperature.
    """
    logits = processed(logits, specs, positions, histories=histories)
    best_ids, margins = leaders(logits)
    possible = drawable(logits, specs)
    drafts = [
        DrawnDraft(token_id, margin=margin) if is_possible else None
        for token_id, margin, is_possible in zip(best_ids, margins, possible, strict=True)
    ]
    random = [row for row, spec in enumerate(specs) if spec.temperature > 0]
    if not random:
        return drafts
    own, rest, places = _part(specs, random), _rows(logits, random), _part(positions, random)
    if rule is Rule.RATIO:
        drawn = draw_drafts(probabilities(rest, own), [spec.seed for spec in own], places)
    else:
        drawn = [DrawnDraft(token_id) for token_id in draw(rest, own, places)]
    for row, draft in zip(random, drawn, strict=True):
        if draft is None or not possible[row]:
            drafts[row] = None
        else:
            drafts[row] = replace(draft, margin=margins[row])
    return drafts


def leaders(logits: Tensor) -> tuple[list[int], list[float]]:
    """The best id of each row (`[rows, vocab]`), the lowest on a tie, and its margin.

    That is by how much it leads the second best, to MAX_MARGIN.
    """
    if logits.device.type == "cpu":  # NumPy is twenty times faster
        rows = logits.numpy()
        ids: list[int] = rows.argmax(-1).tolist()
        leads = [_lead(row, place) for row, place in zip(rows, ids, strict=True)]
        return ids, leads
    places = logits.argmax(-1, keepdim=True)
    seconds = logits.scatter(-1, places, -torch.inf).amax(-1, keepdim=True)
    differences = (logits.gather(-1, places) - seconds).flatten().tolist()
    return places.flatten().tolist(), [_margin(difference) for difference in differences]


def _lead(row: NDArray[np.float32], place: int) -> float:
    rivals = (row[:place].max(initial=-np.inf), row[place + 1 :].max(initial=-np.inf))
    return _margin(float(row[place]) - float(max(rivals)))


def _margin(difference: float) -> float:
    """What is not a number leads by nothing."""
    return 0.0 if isnan(difference) else min(difference, MAX_MARGIN)


def _part(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [values[row] for row in rows]


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]
