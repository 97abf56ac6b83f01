"""Penalties on tokens that are there already: repetition, presence and frequency.

Repetition is that of CTRL (Keskar et al., 2019) and transformers: the logit of a token that prompt
or answer hold is divided by the penalty if it is positive, multiplied if negative. Presence and
frequency are OpenAI's: what the answer holds n times loses `presence + n * frequency`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.messages import SamplingSpec


def penalize(logits: Tensor, spec: SamplingSpec, histories: Sequence[Sequence[int]]) -> None:
    """Apply one spec's penalties to its rows `[rows, vocab]`, in place.

    `histories[row]` are all tokens before the one to be drawn; the answer begins at
    `spec.num_prompt_tokens`. Arithmetic is in float64, and stays in the range of the logits.
    """
    if spec.repetition_penalty == 1 and not (spec.presence_penalty or spec.frequency_penalty):
        return
    for rows in _chains(histories):
        _penalize_chain(logits[rows.start : rows.stop], spec, histories[rows.start : rows.stop])


def _chains(histories: Sequence[Sequence[int]]) -> Iterator[range]:
    """Neighbouring rows, each history a beginning of the next: rows over one draft."""
    start = 0
    for row in range(1, len(histories) + 1):
        if row < len(histories):
            before = histories[row - 1]
            if histories[row][: len(before)] == before:
                continue
        yield range(start, row)
        start = row


def _penalize_chain(logits: Tensor, spec: SamplingSpec, histories: Sequence[Sequence[int]]) -> None:
    """One sequence's rows: the tokens of the longest history are counted for each of them."""
    token_ids, inverse = np.unique(np.array(histories[-1], dtype=np.int64), return_inverse=True)
    num_known = int(np.searchsorted(token_ids, logits.shape[-1]))

    def counts(first: int) -> Tensor:
        """How often each row's history holds each token, from position `first` on."""
        each = [
            np.bincount(inverse[first : len(history)], minlength=len(token_ids))[:num_known]
            for history in histories
        ]
        return torch.from_numpy(np.stack(each)).to(logits.device)

    known = torch.from_numpy(token_ids[:num_known]).to(logits.device)
    places = known.expand(len(logits), -1)
    plain = logits.gather(1, places).double()
    values = plain
    if spec.repetition_penalty != 1:
        penalty = spec.repetition_penalty
        penalized = torch.where(values > 0, values / penalty, values * penalty)
        values = torch.where(counts(0) > 0, penalized, values)
    if spec.presence_penalty or spec.frequency_penalty:
        answered = counts(spec.num_prompt_tokens)
        values = values - spec.presence_penalty * (answered > 0)
        values -= spec.frequency_penalty * answered
    largest = torch.finfo(logits.dtype).max
    values = values.clamp(-largest, largest).masked_fill_(plain == -torch.inf, -torch.inf)
    logits.scatter_(1, places, values.to(logits.dtype))
