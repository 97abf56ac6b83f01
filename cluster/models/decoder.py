"""The transformer of the Llama shape, lean and device-neutral, over a flat batch of rows.

Only attention knows about sequences: everything else sees `[num_tokens, hidden]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cluster.models.attention import AttentionPlan, Segment, attend, plan_attention
from cluster.models.kv_cache import KVCache
from cluster.models.linear import Linear
from cluster.models.rotary import rotate
from cluster.models.spec import ModelSpec

__all__ = ["Decoder", "Layer", "Segment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights. q, k, v are one linear, gate and up another.

    `qk_norm` is `[num_heads + num_kv_heads, head_dim]`: the q norm once per query head, then the
    k norm once per key head.
    """

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A causal language model; `rotary` is `[max positions, head_dim / 2]`, complex."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: Sequence[Layer],
        final_norm: Tensor,
        head: Linear,
        rotary: Tensor,
    ) -> None:
        self.spec = spec
        self.device = embedding.device
        self.dtype = embedding.dtype  # of activations and of the cache
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._rotary = rotary
        self._epsilon = torch.tensor(spec.rms_norm_eps, device=self.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """Compute every row and write its key and value into the cache.

        `token_ids` is `[num_tokens]` int64, the segments' rows one after another. A position that
        was computed before is overwritten. Returns `[num_tokens, hidden]` after the final norm.
        """
        plan = plan_attention(self.spec, segments, cache)
        factors = self._rotary_factors(plan.positions)
        # A row that is alone is computed twice: linears round one row in another way than more.
        hidden = functional.embedding(_at_least_two(token_ids), self._embedding)
        layers = zip(self._layers, cache.layers.unbind(), self.spec.sliding_windows, strict=True)
        for layer, keys_values, window in layers:
            hidden = self._attention(layer, hidden, factors, keys_values, plan, window)
            hidden = self._mlp(layer, hidden)
        return self._norm(hidden, self._final_norm)[: len(token_ids)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`, float32."""
        return self._head(_at_least_two(hidden))[: len(hidden)].float()

    def _attention(
        self,
        layer: Layer,
        hidden: Tensor,
        factors: Tensor,
        keys_values: Tensor,
        plan: AttentionPlan,
        window: int | None,
    ) -> Tensor:
        spec = self.spec
        heads = layer.qkv(self._norm(hidden, layer.input_norm))
        heads = heads.view(hidden.shape[0], -1, spec.head_dim)
        if layer.qk_norm is not None:
            normed = heads[:, : -spec.num_kv_heads]
            normed.copy_(self._norm(normed) * layer.qk_norm)
        heads = rotate(heads, factors)
        keys_values.index_copy_(0, plan.slots, heads[:, spec.num_heads :])
        return layer.output.add_to(hidden, attend(spec, heads, keys_values, plan, window))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down.add_to(hidden, functional.silu(gate) * up)

    def _norm(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dimension, in float32; fewer operations than torch's own."""
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
        per_element = 1 / rows.shape[-1]
        scale = torch.addcmul(self._epsilon, length, length, value=per_element).rsqrt_()
        normed = (rows * scale).to(rows.dtype)
        return normed if weight is None else normed.mul_(weight)

    def _rotary_factors(self, positions: Tensor) -> Tensor:
        """Factors for every head of every row; values are 'rotated' by one, that is kept."""
        spec = self.spec
        factors = torch.ones(
            (positions.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim // 2),
            dtype=self._rotary.dtype,
            device=self.device,
        )
        factors[:, : -spec.num_kv_heads] = self._rotary[positions].unsqueeze(1)
        return factors


def _at_least_two(rows: Tensor) -> Tensor:
    """The rows, or the only one twice."""
    return torch.cat([rows, rows]) if len(rows) == 1 else rows
