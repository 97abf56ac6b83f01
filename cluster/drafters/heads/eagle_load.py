"""From a published EAGLE or EAGLE-3 folder, or one in the Speculators format, to a head.

EAGLE          config.json of the layer; fc, layers.0.*, without an input norm; embed_tokens
EAGLE-3        the same; fc, midlayer.*, with input_layernorm and hidden_norm; norm, lm_head, d2t
Speculators    config.json with speculators_model_type and transformer_layer_config;
               eagle: fusion_fc, transformer.*; eagle3: as EAGLE-3, with layers.0 for midlayer
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cluster.drafters.heads.checkpoint import HeadWeights, positive, read_config, stored_names
from cluster.drafters.heads.eagle import EagleHead
from cluster.drafters.heads.fusions import Eagle1Fusion, Eagle3Fusion, Embed
from cluster.drafters.heads.layer import DraftLayer, LayerWeights
from cluster.errors import ConfigurationError, UnsupportedFeature
from cluster.models.decoder import Decoder
from cluster.models.linear import Linear, MakeLinear, linear_for
from cluster.models.load import DTYPES
from cluster.models.rotary import pair_up
from cluster.models.spec import ModelSpec, spec_from

FILES = ("model.safetensors", "pytorch_model.bin")
RENAMED = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
LEAST_LAYERS = 4  # of a target, for the three that are read of it by default


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """What config.json and the tensors' names say of a head.

    `layer` is the layer's arithmetic. `layers` are the target's that an EAGLE-3 head reads; of
    EAGLE there are none. `draft_vocab_size` is that of an EAGLE-3 head's own vocabulary.
    """

    layer: ModelSpec
    layers: tuple[int, ...]
    draft_vocab_size: int
    norms_residual: bool

    def context(self, max_model_len: int) -> int:
        """Tokens that a slot holds."""
        return min(max_model_len, self.layer.max_position_embeddings)


def load_eagle_spec(folder: Path, target: ModelSpec) -> EagleSpec:
    """Read config.json, for heads of either version.

    Raises ConfigurationError where the head is not for such a target, UnsupportedFeature.
    """
    config = read_config(folder)
    fields, version = _format(config, folder)
    if version is None:
        names = {_plain(name) for name in stored_names(folder, FILES)}
        version = "eagle3" if "layers.0.hidden_norm.weight" in names else "eagle"
    layer = spec_from(fields, where=f"head {str(folder)!r}")
    _refuse_other_layers(config, layer)
    if layer.vocab_size != target.vocab_size:
        raise ConfigurationError(
            f"head {str(folder)!r}: its vocabulary has {layer.vocab_size} entries, the target's "
            f"{target.vocab_size}"
        )
    if version == "eagle":
        if layer.hidden_size != target.hidden_size:
            raise ConfigurationError(
                f"head {str(folder)!r}: its hidden states have {layer.hidden_size} elements, the "
                f"target's {target.hidden_size}"
            )
        layers: tuple[int, ...] = ()
    else:
        layers = _read_layers(config, target, folder)
    return EagleSpec(
        layer=layer,
        layers=layers,
        draft_vocab_size=positive(config, "draft_vocab_size", layer.vocab_size, folder=folder),
        norms_residual=bool(config.get("norm_before_residual", False)),
    )


def load_eagle(
    folder: Path,
    target: Decoder,
    *,
    dtype: str,
    num_sequences: int,
    max_model_len: int,
    max_draft: int,
) -> EagleHead:
    """A head for a target. Raises ConfigurationError, naming what has a wrong shape."""
    spec = load_eagle_spec(folder, target.spec)
    device = str(target.device)
    weights = HeadWeights(folder, FILES, dtype=DTYPES[dtype], device=device, renamed=RENAMED)
    loader = _Loader(weights, spec, target, linear_for(device, dtype))
    context = spec.context(max_model_len)
    layer = DraftLayer(spec.layer, loader.layer(), num_slots=num_sequences, context=context)
    return EagleHead(
        loader.eagle3() if spec.layers else loader.eagle1(),
        layer,
        num_sequences=num_sequences,
        context=context,
        max_draft=max_draft,
    )


class _Loader:
    """Makes the parts of a head out of its weights."""

    def __init__(
        self, weights: HeadWeights, spec: EagleSpec, target: Decoder, make_linear: MakeLinear
    ) -> None:
        self._weights = weights
        self._spec = spec
        self._target = target
        self._make_linear = make_linear

    def eagle1(self) -> Eagle1Fusion:
        """Fused by one linear, with a bias or not."""
        size = self._spec.layer.hidden_size
        return Eagle1Fusion(
            embed=self._target.embed,
            fc=self._linear("fc", size, 2 * size),
            head=self._target.logits,
        )

    def eagle3(self) -> Eagle3Fusion:
        """Low, middle and high states, and a vocabulary of its own."""
        spec, target = self._spec, self._target.spec
        size = spec.layer.hidden_size
        return Eagle3Fusion(
            layers=spec.layers,
            embed=self._embed(),
            fc=self._linear("fc", size, len(spec.layers) * target.hidden_size),
            embedding_norm=self._weights.take("layers.0.input_layernorm.weight", (size,)),
            hidden_norm=self._weights.take("layers.0.hidden_norm.weight", (size,)),
            final_norm=self._weights.take("norm.weight", (size,)),
            head=self._linear("lm_head", spec.draft_vocab_size, size),
            token_ids=self._token_ids(),
            vocab_size=target.vocab_size,
            epsilon=spec.layer.rms_norm_eps,
            norms_residual=spec.norms_residual,
        )

    def layer(self) -> LayerWeights:
        """The decoder layer; the first linear of EAGLE-3 takes two rows side by side."""
        spec = self._spec.layer
        size, inner = spec.hidden_size, spec.intermediate_size
        inputs = 2 * size if self._spec.layers else size
        gate_up = torch.cat(
            [
                self._weights.take(f"layers.0.mlp.{part}_proj.weight", (inner, size))
                for part in ("gate", "up")
            ]
        )
        return LayerWeights(
            qkv=self._qkv(inputs),
            output=self._linear("layers.0.self_attn.o_proj", size, spec.num_heads * spec.head_dim),
            mlp_norm=self._weights.take("layers.0.post_attention_layernorm.weight", (size,)),
            gate_up=self._make_linear(gate_up, None),
            down=self._linear("layers.0.mlp.down_proj", size, inner),
        )

    def _linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """A linear, with its bias if it has one."""
        weight = self._weights.take(f"{name}.weight", (outputs, inputs))
        bias = None
        if f"{name}.bias" in self._weights:
            bias = self._weights.take(f"{name}.bias", (outputs,))
        return self._make_linear(weight, bias)

    def _qkv(self, inputs: int) -> Linear:
        """q, k, v as one; q and k with rotated elements side by side."""
        spec = self._spec.layer
        sizes = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}

        def part(which: str, kind: str, *inner: int) -> Tensor:
            shape = (sizes[which] * spec.head_dim, *inner)
            tensor = self._weights.take(f"layers.0.self_attn.{which}_proj.{kind}", shape)
            return tensor if which == "v" else pair_up(tensor, spec.head_dim)

        weight = torch.cat([part(which, "weight", inputs) for which in sizes])
        if not spec.qkv_bias:
            return self._make_linear(weight, None)
        return self._make_linear(weight, torch.cat([part(which, "bias") for which in sizes]))

    def _embed(self) -> Embed:
        """The head's own embedding, or the target's where it has none."""
        spec, target = self._spec.layer, self._target.spec
        if "embed_tokens.weight" in self._weights:
            shape = (spec.vocab_size, spec.hidden_size)
            weight = self._weights.take("embed_tokens.weight", shape)
            return partial(functional.embedding, weight=weight)
        if spec.hidden_size != target.hidden_size:
            raise ConfigurationError(
                f"head {str(self._weights.file)!r}: no embed_tokens.weight, and the target's has "
                f"{target.hidden_size} elements a token where the head needs {spec.hidden_size}"
            )
        return self._target.embed

    def _token_ids(self) -> Tensor | None:
        """The target's id of each entry of the head's vocabulary: its own plus d2t."""
        size, vocab_size = self._spec.draft_vocab_size, self._target.spec.vocab_size
        if "d2t" not in self._weights:
            if size != vocab_size:
                raise ConfigurationError(
                    f"head {str(self._weights.file)!r}: its vocabulary has {size} entries of the "
                    f"target's {vocab_size}, and there is no d2t to say which"
                )
            return None
        token_ids = torch.arange(size) + self._weights.as_stored("d2t", (size,))
        distinct = set(token_ids.tolist())
        if len(distinct) < size or min(distinct) < 0 or max(distinct) >= vocab_size:
            raise ConfigurationError(
                f"head {str(self._weights.file)!r}: d2t has {len(distinct)} different ids for "
                f"{size} entries, from {min(distinct)} to {max(distinct)}, of the target's "
                f"{vocab_size}"
            )
        return token_ids.to(self._target.device)


def _format(config: Mapping[str, Any], folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """The layer's own config, and the version where config.json names it."""
    if "speculators_model_type" not in config:
        if "speculators_config" in config:
            raise ConfigurationError(f"head {str(folder)!r}: no speculators_model_type")
        return config, None
    version = config["speculators_model_type"]
    if version not in ("eagle", "eagle3"):
        raise UnsupportedFeature(
            "speculators_model_type", f"{version!r} is not supported; supported: eagle, eagle3"
        )
    fields = config.get("transformer_layer_config")
    if not isinstance(fields, Mapping):
        raise ConfigurationError(f"head {str(folder)!r}: no transformer_layer_config")
    return fields, str(version)


def _refuse_other_layers(config: Mapping[str, Any], layer: ModelSpec) -> None:
    if layer.num_layers != 1:
        raise UnsupportedFeature("num_hidden_layers", f"{layer.num_layers} in a head, not 1")
    if layer.qk_norm:
        raise UnsupportedFeature("model_type", "norms of queries and keys in a head")
    for field in ("layernorms", "add_para_norm", "norm_before_fc"):
        if config.get(field):
            raise UnsupportedFeature(field, "norms before the fused linear")
    if _aux(config).get("use_aux_hidden_state") is False:
        raise UnsupportedFeature("use_aux_hidden_state", "EAGLE-3 with the last state alone")


def _aux(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What some checkpoints have in a section of its own."""
    section = config.get("eagle_config")
    return section if isinstance(section, Mapping) else config


def _read_layers(config: Mapping[str, Any], target: ModelSpec, folder: Path) -> tuple[int, ...]:
    """The layers of the target whose inputs are read."""
    number = target.num_layers
    layers = _aux(config).get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        if number < LEAST_LAYERS:
            raise ConfigurationError(
                f"head {str(folder)!r}: layers 2, {number // 2} and {number - 3} are read of a "
                f"target that has {number}"
            )
        return usual_layers(number)
    if not layers or not all(isinstance(each, int) and 0 <= each <= number for each in layers):
        raise ConfigurationError(
            f"head {str(folder)!r}: eagle_aux_hidden_state_layer_ids {layers}, and the target has "
            f"{number} layers"
        )
    return tuple(layers)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high of a target of LEAST_LAYERS layers or more."""
    return (2, num_layers // 2, num_layers - 3)


def _plain(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")
