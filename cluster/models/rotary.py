"""Rotary positions as complex factors (RoFormer, arXiv:2104.09864).

Checkpoints rotate element i of a head with element i + head_dim / 2. Here the two are neighbours,
which `pair_up` sees to at load, so that one complex product rotates a whole row of heads. Queries
and keys are permuted alike, hence their products do not change.
"""

import math

import torch
from torch import Tensor

from cluster.models.spec import ModelSpec, RopeScaling


def rotary_table(spec: ModelSpec, num_positions: int) -> Tensor:
    """Unit complex numbers `[num_positions, head_dim / 2]`, complex64."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling is not None:
        frequencies = _stretch(frequencies, spec.rope_scaling)
    frequencies = frequencies / spec.rope_linear_factor
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(heads: Tensor, factors: Tensor) -> Tensor:
    """Rotate `[num_tokens, heads, head_dim]` by `[num_tokens, heads, head_dim / 2]` factors.

    The product is in float32 whatever the heads' dtype; heads of float32 are rotated in place.
    """
    pairs = heads.float().view(torch.complex64)
    return pairs.mul_(factors).view(torch.float32).to(heads.dtype)


def pair_up(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the output rows of a q or k projection, its bias or its norm, head by head."""
    heads = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend in between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
