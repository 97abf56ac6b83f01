"""From a folder of safetensors to a decoder."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from cluster.models.decoder import Decoder, Embed, Head, Layer
from cluster.models.linear import Linear, MakeLinear, linear_for
from cluster.models.parallel import (
    Ranks,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from cluster.models.rotary import pair_up, rotary_table
from cluster.models.screen import Screen, is_screened
from cluster.models.shard import Shard
from cluster.models.spec import ModelSpec, load_spec
from cluster.models.weights import NamedWeights, Weights

__all__ = ["ModelSpec", "load_decoder", "load_spec"]

DTYPES = {
    "float32": torch.float32,
    "int8": torch.float32,  # of what is not a linear's weight
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_decoder(
    folder: Path, *, dtype: str, device: str = "cpu", ranks: Ranks | None = None
) -> Decoder:
    """Build the decoder of a local folder; `dtype` is float32, int8, bfloat16 or float16.

    One of several `ranks` reads and holds its own part of the weights, and computes together with
    the others: all of them call the decoder's methods alike. Raises UnsupportedArchitecture,
    UnsupportedFeature, or ConfigurationError when a weight is missing, the device has no such
    dtype or the model cannot be split over so many ranks.
    """
    linear_for(device, dtype)  # refused before anything is read
    whole = load_spec(folder)
    with Weights(folder, dtype=DTYPES[dtype], device=device) as weights:
        return build_decoder(whole, weights, dtype=dtype, device=device, ranks=ranks)


def build_decoder(
    whole: ModelSpec,
    weights: NamedWeights,
    *,
    dtype: str,
    device: str = "cpu",
    ranks: Ranks | None = None,
) -> Decoder:
    """The same of weights wherever they are, in `DTYPES[dtype]` and on the device already."""
    make_linear = linear_for(device, dtype)
    shard = Shard.of(whole) if ranks is None else Shard.of(whole, ranks.rank, ranks.size)
    loader = _Loader(weights, shard, make_linear, ranks, absorbs=dtype == "float32")
    embed, head = loader.vocabulary()
    screened = ranks is None and is_screened(whole, dtype=dtype, device=device)
    return Decoder(
        shard.spec,
        embed=embed,
        layers=[loader.layer(f"model.layers.{index}.") for index in range(whole.num_layers)],
        final_norm=weights.whole("model.norm.weight"),
        head=head,
        rotary=rotary_table(whole, whole.max_position_embeddings).to(device),
        screen=Screen(weights.whole("model.embed_tokens.weight")) if screened else None,
    )


class _Loader:
    """Makes a shard's layers of its part of the weights.

    If it `absorbs`, linears take in the weights of the norms before them. A coarser weight would
    lose by that: int8 twice what its rounding costs anyway.
    """

    def __init__(
        self,
        weights: NamedWeights,
        shard: Shard,
        make_linear: MakeLinear,
        ranks: Ranks | None,
        *,
        absorbs: bool,
    ) -> None:
        self._weights = weights
        self._shard = shard
        self._make_linear = make_linear
        self._ranks = ranks
        self._absorbs = absorbs

    def vocabulary(self) -> tuple[Embed, Head]:
        """The embedding and the head, of one weight where they are tied."""
        embedding = self._entries("model.embed_tokens.weight")
        tied = self._shard.spec.tied_head
        head = self._make_linear(embedding if tied else self._entries("lm_head.weight"), None)
        if self._ranks is None:
            return partial(functional.embedding, weight=embedding), head
        first, vocab_size = self._shard.first_token_id, self._shard.spec.vocab_size
        return (
            VocabularyParallelEmbedding(embedding, first_token_id=first, ranks=self._ranks),
            VocabularyParallelHead(head, vocab_size=vocab_size, ranks=self._ranks),
        )

    def layer(self, prefix: str) -> Layer:
        """The layer whose weights' names begin so."""
        weights, shard = self._weights, self._shard
        attention, inner = prefix + "self_attn.", prefix + "mlp."
        input_norm = weights.whole(prefix + "input_layernorm.weight")
        mlp_norm = weights.whole(prefix + "post_attention_layernorm.weight")
        qkv, qkv_bias = self._qkv(attention)
        gate_up = torch.cat(
            [weights.rows(inner + f"{part}_proj.weight", shard.inner) for part in ("gate", "up")]
        )
        if self._absorbs:
            qkv, gate_up = qkv * input_norm, gate_up * mlp_norm
        output = weights.columns(attention + "o_proj.weight", self._elements(shard.heads))
        has_bias = shard.spec.output_bias and shard.rank == 0
        return Layer(
            input_norm=None if self._absorbs else input_norm,
            qkv=self._make_linear(qkv, qkv_bias),
            qk_norm=self._qk_norm(attention) if shard.spec.qk_norm else None,
            output=self._summed(
                output, weights.whole(attention + "o_proj.bias") if has_bias else None
            ),
            mlp_norm=None if self._absorbs else mlp_norm,
            gate_up=self._make_linear(gate_up, None),
            down=self._summed(weights.columns(inner + "down_proj.weight", shard.inner), None),
        )

    def _summed(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear of which every rank has some inputs."""
        linear = self._make_linear(weight, bias)
        return linear if self._ranks is None else RowParallelLinear(linear, self._ranks)

    def _entries(self, name: str) -> Tensor:
        """The shard's entries of the vocabulary, and zeros for padding."""
        own = self._weights.rows(name, self._shard.token_ids)
        missing = self._shard.vocabulary_size - len(own)
        return functional.pad(own, (0, 0, 0, missing)) if missing else own

    def _qkv(self, prefix: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of q, k, v as one; q and k with rotated elements side by side."""
        head_dim = self._shard.spec.head_dim
        queries, keys = self._elements(self._shard.heads), self._elements(self._shard.kv_heads)

        def fused(kind: str) -> Tensor:
            q = self._weights.rows(f"{prefix}q_proj.{kind}", queries)
            k, v = (self._weights.rows(f"{prefix}{part}_proj.{kind}", keys) for part in "kv")
            return torch.cat([pair_up(q, head_dim), pair_up(k, head_dim), v])

        return fused("weight"), fused("bias") if self._shard.spec.qkv_bias else None

    def _qk_norm(self, prefix: str) -> Tensor:
        """Norm weights of every query head, then of every key head: `[heads, head_dim]`."""
        spec = self._shard.spec
        q, k = (
            pair_up(self._weights.whole(f"{prefix}{part}_norm.weight"), spec.head_dim)
            for part in "qk"
        )
        return torch.cat([q.repeat(spec.num_heads, 1), k.repeat(spec.num_kv_heads, 1)])

    def _elements(self, heads: range) -> range:
        """The elements of some heads."""
        size = self._shard.spec.head_dim
        return range(heads.start * size, heads.stop * size)
