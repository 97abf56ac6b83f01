"""What a checkpoint's config says about its arithmetic, or why it is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from cluster.errors import ConfigurationError, UnsupportedArchitecture, UnsupportedFeature

ATTENTION_COST = 4.0  # of a product with a key or a value, in products with a weight


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The llama3 rule: long wavelengths are stretched by `factor`, short ones are not."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder of the Llama shape, complete: nothing else in a config changes a logit."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_linear_factor: float  # 1.0: positions are not stretched
    rope_scaling: RopeScaling | None
    sliding_windows: tuple[int | None, ...]  # by layer; a row sees itself and window - 1 before it
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied_head: bool

    @property
    def keys_per_row(self) -> int:
        """Keys that a row looks at in the time that its products with all weights take."""
        per_key = 2 * self.num_layers * self.num_heads * self.head_dim
        return max(int(self.weights_per_row / per_key / ATTENTION_COST), 1)

    @property
    def weights_per_row(self) -> int:
        """Weights that a row is multiplied with, the head's included."""
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        per_layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * per_layer + self.hidden_size * self.vocab_size


@dataclass(frozen=True, slots=True)
class _Family:
    """Where the families differ: which attention biases and norms a checkpoint holds."""

    qkv_bias: Callable[[PreTrainedConfig], bool]
    output_bias: Callable[[PreTrainedConfig], bool]
    qk_norm: bool


def _attention_bias(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "attention_bias", False))


FAMILIES = {
    "llama": _Family(_attention_bias, _attention_bias, qk_norm=False),
    "mistral": _Family(lambda _: False, lambda _: False, qk_norm=False),
    "qwen2": _Family(lambda _: True, lambda _: False, qk_norm=False),
    "qwen3": _Family(_attention_bias, _attention_bias, qk_norm=True),
}


def load_spec(folder: Path) -> ModelSpec:
    """Read config.json.

    Raises UnsupportedArchitecture with the list of supported ones, UnsupportedFeature for an
    option that would change the arithmetic, ConfigurationError for a config that cannot be read.
    """
    try:
        raw, _ = PreTrainedConfig.get_config_dict(folder)
        _check_family(raw)
        return _spec_of(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"model {str(folder)!r}: {error}") from error


def spec_from(fields: Mapping[str, Any], *, where: str) -> ModelSpec:
    """The same of a config's fields that are in no config.json of their own, but in `where`."""
    try:
        _check_family(fields)
        return _spec_of(AutoConfig.for_model(**fields))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _check_family(fields: Mapping[str, Any]) -> None:
    if fields.get("model_type") not in FAMILIES:
        raise UnsupportedArchitecture(str(fields.get("model_type")), tuple(FAMILIES))


def _spec_of(config: PreTrainedConfig) -> ModelSpec:
    family = FAMILIES[config.model_type]
    _refuse_other_arithmetic(config)
    linear_factor, scaling = _rope(config.rope_parameters)
    return ModelSpec(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        rope_linear_factor=linear_factor,
        rope_scaling=scaling,
        sliding_windows=_sliding_windows(config),
        qkv_bias=family.qkv_bias(config),
        output_bias=family.output_bias(config),
        qk_norm=family.qk_norm,
        tied_head=config.tie_word_embeddings,
    )


def _refuse_other_arithmetic(config: PreTrainedConfig) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedFeature("hidden_act", f"{config.hidden_act!r} is not SwiGLU's silu")
    if getattr(config, "mlp_bias", False):
        raise UnsupportedFeature("mlp_bias", "biases in the feed-forward part are not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedFeature("quantization_config", "quantised weights are not supported")


def _rope(parameters: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The linear factor and the llama3 scaling; any other way of scaling is refused."""
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedFeature("partial_rotary_factor", "only whole heads are rotated")
    if kind == "default":
        return 1.0, None
    if kind == "linear":
        return float(parameters["factor"]), None
    if kind == "llama3":
        return 1.0, RopeScaling(
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
        )
    raise UnsupportedFeature(
        "rope_type", f"{kind!r} is not supported; supported: default, linear, llama3"
    )


def _sliding_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Each layer's window, None where it sees everything before."""
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [_default_kind(config)] * num_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedFeature("layer_types", f"{', '.join(sorted(unknown))} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _default_kind(config: PreTrainedConfig) -> str:
    """What all layers of a config without `layer_types` do: mistral's window is on all of them."""
    return "sliding_attention" if config.model_type == "mistral" else "full_attention"
