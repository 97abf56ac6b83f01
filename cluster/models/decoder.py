"""The transformer of the Llama shape, lean and device-neutral, over a flat batch of rows.

Only attention knows about sequences: everything else sees `[num_tokens, hidden]`.
"""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from cluster.models.attention import AttentionPlan, Segment, plan_attention
from cluster.models.compiled import CompiledLayers, CompiledPlan, serves
from cluster.models.hidden import Taps
from cluster.models.kv_cache import KVCache
from cluster.models.linear import Linear, at_least_two
from cluster.models.pointwise import pointwise_for, rms_norm
from cluster.models.screen import Screen
from cluster.models.spec import ModelSpec

__all__ = ["Decoder", "Embed", "Head", "Layer", "Segment"]

Embed = Callable[[Tensor], Tensor]  # `[rows]` token ids to `[rows, hidden]`
Head = Callable[[Tensor], Tensor]  # `[rows, hidden]`, two rows or more, to `[rows, vocab]`


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights. q, k, v are one linear, gate and up another.

    The weight of a norm is None where the linear after it has taken it in. `qk_norm` is
    `[num_heads + num_kv_heads, head_dim]`: the q norm once per query head, then the k norm once
    per key head.
    """

    input_norm: Tensor | None
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor | None
    gate_up: Linear
    down: Linear


class Decoder:
    """A causal language model; `rotary` is `[max positions, head_dim / 2]`, complex.

    Of several ranks each has a decoder with a spec of its own heads, all compute the same hidden
    rows together, and only rank 0 gets whole logits: the others get the part they computed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embed: Embed,
        layers: Sequence[Layer],
        final_norm: Tensor,
        head: Head,
        rotary: Tensor,
        screen: Screen | None = None,
    ) -> None:
        self.spec = spec
        self.device = final_norm.device
        self.dtype = final_norm.dtype  # of activations and of the cache
        self._embed = embed
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._screen = screen
        self._rotary = rotary
        self._pointwise = pointwise_for(self.device, self.dtype)
        # A row that is alone is computed twice: linears round one in another way than more. Not so
        # compiled ones.
        self._paired = not serves(self.device, self.dtype)
        self._at_once = None if self._paired else CompiledLayers.of(spec, self._layers)
        self._no_attention: frozenset[int] = frozenset()
        self._no_mlp: frozenset[int] = frozenset()

    def without(self, *, attention: Collection[int] = (), mlp: Collection[int] = ()) -> Self:
        """The same weights, leaving out the attention and feed-forward part of some layers.

        It reads and writes the same places of the same cache as the whole.
        """
        part = copy(self)
        part._at_once = None  # noqa: SLF001
        part._no_attention, part._no_mlp = frozenset(attention), frozenset(mlp)  # noqa: SLF001
        return part

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        segments: Sequence[Segment],
        cache: KVCache,
        taps: Taps | None = None,
    ) -> Tensor:
        """Compute every row and write its key and value into the cache.

        `token_ids` is `[num_tokens]` int64, the segments' rows one after another. A position that
        was computed before is overwritten. Returns `[num_tokens, hidden]` after the final norm;
        `taps` get what they ask for on the way there.
        """
        plan = plan_attention(self.spec, segments, cache, paired=self._paired)
        factors = self._rotary_factors(plan.positions)
        hidden = self._embed(at_least_two(token_ids) if self._paired else token_ids)
        if self._at_once is not None and isinstance(plan, CompiledPlan):
            return self._norm(self._at_once(hidden, factors, plan, taps), self._final_norm)
        for index, layer in enumerate(self._layers):
            if taps is not None:
                taps.offer(index, hidden[: len(token_ids)])
            if index not in self._no_attention:
                hidden = self._attention(index, hidden, factors, plan)
            if index not in self._no_mlp:
                hidden = self._mlp(layer, hidden)
        if taps is not None:
            taps.offer(len(self._layers), hidden[: len(token_ids)])
        return self._norm(hidden, self._final_norm)[: len(token_ids)]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """`[rows]` int64 to `[rows, hidden]`: what the first layer is given."""
        return self._embed(token_ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`, float32."""
        rows = at_least_two(hidden) if self._paired else hidden
        return self._head(rows)[: len(hidden)].float()

    def largest(self, hidden: Tensor) -> list[int] | None:
        """The token of the largest of `logits` for each of `[rows, hidden]`.

        None where nothing is faster than computing the logits.
        """
        return None if self._screen is None else self._screen.largest(hidden)

    def _attention(
        self, index: int, hidden: Tensor, factors: Tensor, plan: AttentionPlan
    ) -> Tensor:
        spec, layer = self.spec, self._layers[index]
        heads = layer.qkv(self._norm(hidden, layer.input_norm)).view(
            hidden.shape[0], -1, spec.head_dim
        )
        if layer.qk_norm is not None:
            queries_keys = heads[:, : -spec.num_kv_heads]
            queries_keys.copy_(rms_norm(queries_keys, layer.qk_norm, spec.rms_norm_eps))
        return layer.output.add_to(hidden, plan.attend(heads, factors, index))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))
        return layer.down.add_to(hidden, self._pointwise.swiglu(gate_up))

    def _norm(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        return self._pointwise.norm(rows, weight, self.spec.rms_norm_eps)

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
