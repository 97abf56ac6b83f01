"""From a folder of safetensors to a decoder."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cluster.errors import ConfigurationError
from cluster.models.decoder import Decoder, Layer
from cluster.models.linear import MakeLinear, linear_for
from cluster.models.rotary import pair_up, rotary_table
from cluster.models.spec import ModelSpec, load_spec

__all__ = ["ModelSpec", "load_decoder", "load_spec"]

DTYPES = {
    "float32": torch.float32,
    "int8": torch.float32,  # of what is not a linear's weight
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHARDED = "model.safetensors.index.json"

ReadWeight = Callable[[str], Tensor]


def load_decoder(folder: Path, *, dtype: str, device: str = "cpu") -> Decoder:
    """Build the decoder of a local folder; `dtype` is float32, int8, bfloat16 or float16.

    Raises UnsupportedArchitecture, UnsupportedFeature, or ConfigurationError when a weight is
    missing or the device has no such dtype.
    """
    make_linear = linear_for(device, dtype)
    spec = load_spec(folder)
    with ExitStack() as stack:
        read = _reader(folder, stack, DTYPES[dtype], device)
        embedding = read("model.embed_tokens.weight")
        return Decoder(
            spec,
            embedding=embedding,
            layers=[
                _layer(spec, make_linear, read, f"model.layers.{index}.")
                for index in range(spec.num_layers)
            ],
            final_norm=read("model.norm.weight"),
            head=make_linear(embedding if spec.tied_head else read("lm_head.weight"), None),
            rotary=rotary_table(spec, spec.max_position_embeddings).to(device),
        )


def _reader(folder: Path, stack: ExitStack, dtype: torch.dtype, device: str) -> ReadWeight:
    """A function that reads one named tensor, from whichever file holds it."""
    index = folder / SHARDED
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.is_file()
        else ["model.safetensors"]
    )
    holders = {}
    for name in names:
        if not (folder / name).is_file():
            raise ConfigurationError(f"model {str(folder)!r}: no {name}")
        file = stack.enter_context(safe_open(folder / name, framework="pt", device=device))
        holders.update(dict.fromkeys(file.keys(), file))

    def read(name: str) -> Tensor:
        if name not in holders:
            raise ConfigurationError(f"model {str(folder)!r}: no weight {name!r}")
        weight: Tensor = holders[name].get_tensor(name)
        return weight.to(dtype)

    return read


def _layer(spec: ModelSpec, make_linear: MakeLinear, read: ReadWeight, prefix: str) -> Layer:
    return Layer(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=make_linear(*_qkv(spec, read, prefix + "self_attn.")),
        qk_norm=_qk_norm(spec, read, prefix + "self_attn.") if spec.qk_norm else None,
        output=make_linear(
            read(prefix + "self_attn.o_proj.weight"),
            read(prefix + "self_attn.o_proj.bias") if spec.output_bias else None,
        ),
        mlp_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=make_linear(
            torch.cat([read(prefix + f"mlp.{part}_proj.weight") for part in ("gate", "up")]), None
        ),
        down=make_linear(read(prefix + "mlp.down_proj.weight"), None),
    )


def _qkv(spec: ModelSpec, read: ReadWeight, prefix: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of q, k and v as one; q and k with rotated elements side by side."""

    def fused(kind: str) -> Tensor:
        q, k, v = (read(f"{prefix}{part}_proj.{kind}") for part in "qkv")
        return torch.cat([pair_up(q, spec.head_dim), pair_up(k, spec.head_dim), v])

    return fused("weight"), fused("bias") if spec.qkv_bias else None


def _qk_norm(spec: ModelSpec, read: ReadWeight, prefix: str) -> Tensor:
    """Norm weights of every query head, then of every key head: `[heads, head_dim]`."""
    q, k = (pair_up(read(f"{prefix}{part}_norm.weight"), spec.head_dim) for part in "qk")
    return torch.cat([q.repeat(spec.num_heads, 1), k.repeat(spec.num_kv_heads, 1)])
