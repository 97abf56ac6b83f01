"""What a row is to be drawn from, written down anew: slow, in plain Python and float64."""

import math
from collections.abc import Sequence

from cluster.messages import SamplingSpec

NEVER = -math.inf


def reference_logits(
    logits: Sequence[float],
    spec: SamplingSpec,
    position: int,
    history: Sequence[int] = (),
    allowed: Sequence[bool] | None = None,
) -> list[float]:
    """One row after bias, penalties and all that forbids, entry by entry."""
    answer = history[spec.num_prompt_tokens :]
    values = []
    for token_id, logit in enumerate(logits):
        value = logit + sum(bias for biased, bias in spec.logit_bias if biased == token_id)
        if token_id in history:
            penalty = spec.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        times = sum(1 for each in answer if each == token_id)
        value -= spec.frequency_penalty * times
        value -= spec.presence_penalty if times else 0.0
        if not _is_allowed(token_id, spec, position, history):
            value = NEVER
        if allowed is not None and not allowed[token_id]:
            value = NEVER
        values.append(value)
    return values


def _is_allowed(token_id: int, spec: SamplingSpec, position: int, history: Sequence[int]) -> bool:
    if spec.allowed_token_ids is not None and token_id not in spec.allowed_token_ids:
        return False
    if token_id in spec.banned_token_ids:
        return False
    if position < spec.suppressed_before and token_id in spec.suppressed_token_ids:
        return False
    text = [*history, token_id]
    return all(
        len(sequence) > len(text) or text[len(text) - len(sequence) :] != list(sequence)
        for sequence in spec.banned_sequences
    )


def reference_probs(values: Sequence[float], spec: SamplingSpec) -> list[float] | None:
    """One row's probabilities after temperature and filters, of processed logits.

    All 0 when nothing is left. None where float32 rounding could decide what a filter keeps.
    """
    highest = max(values)
    if highest == NEVER:
        return [0.0] * len(values)
    ranked = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    if spec.temperature == 0:
        return [float(token_id == ranked[0]) for token_id in range(len(values))]
    weights = [math.exp((value - highest) / spec.temperature) for value in values]
    kept = ranked[: spec.top_k or len(values)]
    total = math.fsum(weights[token_id] for token_id in kept)
    mass, survivors = 0.0, []
    for token_id in kept:
        weight = weights[token_id]
        if spec.top_p < 1 and abs(mass / total - spec.top_p) < 1e-5:
            return None
        if 0 < spec.min_p < 1 and abs(weight - spec.min_p) < 1e-5:
            return None
        if (spec.top_p == 1 or mass < spec.top_p * total) and weight >= spec.min_p and weight > 0:
            survivors.append(token_id)
        mass += weight
    total = math.fsum(weights[token_id] for token_id in survivors)
    return [
        weights[token_id] / total if token_id in survivors else 0.0
        for token_id in range(len(values))
    ]
