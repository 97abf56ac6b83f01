"""Known distributions over eight tokens, and the test of whether what comes out follows them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy import stats

from cluster.messages import SamplingSpec
from cluster.sampling.draw import distribution, sample

VOCAB = 8
NUM_DRAWS = 50_000
FEW_DRAWS = 5_000  # where equality or a gross fault is looked for, not a distribution
FIRST_POSITION = 11
FILTERS: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}


@dataclass(frozen=True)
class Chain:
    """A model whose logits depend on the last token only: `[VOCAB, VOCAB]`."""

    logits: torch.Tensor

    def draw(self, tokens: np.ndarray, specs: Sequence[SamplingSpec], position: int) -> np.ndarray:
        """One token after each of `tokens`, at that absolute position."""
        positions = [position] * len(tokens)
        rows = self.logits[torch.from_numpy(tokens)]
        return np.array(sample(rows, specs, positions), dtype=np.int64)

    def probs(self, name: str) -> torch.Tensor:
        """What is drawn from after each token under a filter, `[VOCAB, VOCAB]` float64."""
        spec = SamplingSpec(seed=0, **FILTERS[name])  # type: ignore[arg-type]
        return distribution(self.logits, [spec] * VOCAB, [0] * VOCAB)


@cache
def specs_of(name: str) -> tuple[SamplingSpec, ...]:
    return tuple(SamplingSpec(seed=seed, **FILTERS[name]) for seed in range(NUM_DRAWS))


def target_chain() -> Chain:
    generator = torch.Generator().manual_seed(5)
    return Chain(1.5 * torch.randn(VOCAB, VOCAB, generator=generator))


def draft_chain(kind: str) -> Chain:
    generator = torch.Generator().manual_seed(6)
    other = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
    one_hot = torch.full((VOCAB, VOCAB), -torch.inf)
    one_hot[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 0.0
    favourite = torch.zeros(VOCAB)
    favourite[2] = 0.5
    return {
        "same": target_chain(),
        "other": Chain(other),
        "near": Chain(target_chain().logits + 0.3 * other),
        "one_hot": Chain(one_hot),
        "favourite": Chain((0.5 * target_chain().logits.softmax(-1) + favourite).log()),
    }[kind]


def processed(logits: Iterable[float], spec: dict[str, float]) -> np.ndarray:
    """The distribution that a row is to be drawn from, written down anew in plain Python."""
    weights = np.exp(np.array(list(logits), dtype=np.float64) / spec["temperature"])
    probs = weights / weights.sum()
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    ranked = ranked[: int(spec.get("top_k", 0)) or len(probs)]
    total, mass, kept = sum(probs[ranked]), 0.0, []
    for token in ranked:
        if mass < spec.get("top_p", 1.0) * total:
            kept.append(token)
        mass += probs[token]
    kept = [token for token in kept if probs[token] >= spec.get("min_p", 0.0) * probs[ranked[0]]]
    result = np.zeros(len(probs))
    result[kept] = probs[kept] / sum(probs[kept])
    return result


def p_values(tokens: np.ndarray, name: str) -> tuple[float, float]:
    """Chi-square of the first token, and of both jointly, against the target alone."""
    by_token = np.array([processed(row.tolist(), FILTERS[name]) for row in target_chain().logits])
    first = by_token[0]
    joint = (first[:, None] * by_token).ravel()
    counts = np.bincount(tokens[:, 0], minlength=VOCAB)
    joint_counts = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    return chi_square(counts, first), chi_square(joint_counts, joint)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """The p-value; cells expected under five times are one cell, an impossible token is p = 0."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(counts[~rare], counts[rare].sum())
    possible = expected > 0
    return float(stats.chisquare(observed[possible], expected[possible]).pvalue)
