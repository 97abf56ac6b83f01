"""The one decoder layer of an EAGLE head, with keys and values of its own.

It attends as the target's layers do; only what goes into it and what it is added to differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cluster.models.attention import AttentionPlan, Segment, plan_attention
from cluster.models.kv_cache import KVCache
from cluster.models.linear import Linear
from cluster.models.pointwise import rms_norm
from cluster.models.rotary import rotary_table
from cluster.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Rotated elements of q and k stand side by side, as `rotary.pair_up` has them."""

    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class DraftLayer:
    """Attention and feed-forward part over a flat batch of two rows or more."""

    def __init__(
        self, spec: ModelSpec, weights: LayerWeights, *, num_slots: int, context: int
    ) -> None:
        self._spec = spec
        self._weights = weights
        device, dtype = weights.mlp_norm.device, weights.mlp_norm.dtype
        self._rotary = rotary_table(spec, context).to(device)
        self._cache = KVCache(
            spec, num_blocks=num_slots, block_size=context, dtype=dtype, device=device
        )

    def plan(self, segments: Sequence[Segment]) -> AttentionPlan:
        """Where the rows of a pass stand. A row that is alone stands twice."""
        return plan_attention(self._spec, segments, self._cache)

    def __call__(self, rows: Tensor, residual: Tensor, plan: AttentionPlan) -> Tensor:
        """`[rows, in]`, normed as they should be, and `[rows, hidden]` to `[rows, hidden]`."""
        spec, weights = self._spec, self._weights
        heads = weights.qkv(rows).view(len(rows), -1, spec.head_dim)
        attended = plan.attend(heads, self._factors(plan.positions), 0)
        hidden = weights.output.add_to(residual, attended)
        normed = rms_norm(hidden, weights.mlp_norm, spec.rms_norm_eps)
        gate, up = weights.gate_up(normed).chunk(2, dim=-1)
        return weights.down.add_to(hidden, functional.silu(gate) * up)

    def _factors(self, positions: Tensor) -> Tensor:
        """For every head of every row; values are 'rotated' by one."""
        spec = self._spec
        shape = (len(positions), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim // 2)
        factors = torch.ones(shape, dtype=self._rotary.dtype, device=self._rotary.device)
        factors[:, : -spec.num_kv_heads] = self._rotary[positions].unsqueeze(1)
        return factors
