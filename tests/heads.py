"""Heads as they are published, of random weights or of weights that must be right.

A `permuted` target says after token t, whatever was before, the token `after(t)`: its hidden state
is 8 times the unit vector of its token, so what a head reads of it can be told exactly.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.models.spec import ModelSpec, load_spec
from tests.checkpoints import make_checkpoint

SIZE = 64  # of a permuted target: its vocabulary and its hidden states
STEP = 12  # a permuted target's next token is this much further
LAYER_FIELDS = ("hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")


def after(token_id: int, steps: int = 1) -> int:
    """What a permuted target says so many tokens after a token."""
    return (token_id + STEP * steps) % SIZE


def permutation(steps: int) -> Tensor:
    """`[SIZE, SIZE]`: the unit vector of a token to that of the one so many steps later."""
    matrix = torch.zeros(SIZE, SIZE)
    for token_id in range(SIZE):
        matrix[after(token_id, steps), token_id] = 1.0
    return matrix


def make_permuted(folder: Path, *, num_layers: int = 4) -> Path:
    """A target whose layers add nothing, whose embedding is one-hot and whose head permutes."""
    make_checkpoint(
        folder,
        vocab_size=SIZE,
        hidden_size=SIZE,
        num_layers=num_layers,
        tie_word_embeddings=False,
        max_position_embeddings=512,
    )
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    weights["model.embed_tokens.weight"] = torch.eye(SIZE)
    weights["model.norm.weight"] = torch.ones(SIZE)
    weights["lm_head.weight"] = permutation(1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_head(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], *, file: str
) -> Path:
    """A head's folder, its tensors as safetensors or pickled, as the file's name says."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(contiguous, folder / file)
    else:
        torch.save(contiguous, folder / file)
    return folder


def noise(shape: Sequence[int], seed: int, scale: float = 0.1) -> Tensor:
    """Random elements."""
    return scale * torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def medusa_tensors(target: ModelSpec, *, num_heads: int, num_layers: int = 1) -> dict[str, Tensor]:
    """Random ones, under the published names."""
    size = target.hidden_size
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            prefix = f"{head}.{layer}.linear."
            tensors[prefix + "weight"] = noise((size, size), 100 * head + layer)
            tensors[prefix + "bias"] = noise((size,), 100 * head + layer + 50)
        tensors[f"{head}.{num_layers}.weight"] = noise((target.vocab_size, size), 100 * head + 99)
    return tensors


def make_medusa(
    folder: Path,
    target: Path,
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    file: str = "medusa_lm_head.safetensors",
) -> Path:
    """Random Medusa heads."""
    tensors = medusa_tensors(load_spec(target), num_heads=num_heads, num_layers=num_layers)
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": "tiny/target",
    }
    return write_head(folder, config, tensors, file=file)


def layer_config(target: ModelSpec, **changes: object) -> dict[str, object]:
    """The config of a head's one layer, in the target's sizes."""
    fields = {field: getattr(target, field) for field in LAYER_FIELDS}
    return (
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "intermediate_size": target.intermediate_size,
            "hidden_act": "silu",
            "rope_theta": 50000.0,
            "tie_word_embeddings": False,
        }
        | fields
        | changes
    )


def layer_tensors(config: Mapping[str, object], inputs: int, prefix: str) -> dict[str, Tensor]:
    """Random weights of one layer, whose q, k and v take `inputs` elements."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    size, inner, width = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    shapes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    tensors = {
        f"{prefix}{name}.weight": noise(shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + noise((size,), 8)
    return tensors


def make_eagle(
    folder: Path,
    target: Path,
    *,
    layout: str = "published",
    changes: Mapping[str, Tensor] | None = None,
    **config: object,
) -> Path:
    """A random EAGLE head, some of its tensors changed; `layout` is published or speculators."""
    spec = load_spec(target)
    fields = layer_config(spec, **config)
    size = spec.hidden_size
    speculators = layout == "speculators"
    fc, prefix = ("fusion_fc", "transformer.") if speculators else ("fc", "layers.0.")
    tensors = {
        f"{fc}.weight": noise((size, 2 * size), 20),
        f"{fc}.bias": noise((size,), 21),
        "embed_tokens.weight": noise((spec.vocab_size, size), 22),
        **layer_tensors(fields, size, prefix),
        **(changes or {}),
    }
    if not speculators:
        return write_head(folder, fields, tensors, file="pytorch_model.bin")
    return write_head(
        folder,
        speculators_config("eagle", fields, fusion_bias=True),
        tensors,
        file="model.safetensors",
    )


def make_eagle3(
    folder: Path,
    target: Path,
    *,
    layout: str = "published",
    token_ids: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    changes: Mapping[str, Tensor] | None = None,
    **config: object,
) -> Path:
    """A random EAGLE-3 head for some of the target's tokens, by default every third one."""
    spec = load_spec(target)
    fields = layer_config(spec, **config)
    size = spec.hidden_size
    own = torch.tensor(token_ids if token_ids is not None else range(1, spec.vocab_size, 3))
    in_own = torch.zeros(spec.vocab_size, dtype=torch.bool)
    in_own[own] = True
    speculators = layout == "speculators"
    prefix = "layers.0." if speculators else "midlayer."
    tensors = {
        "fc.weight": noise((size, 3 * size), 20),
        f"{prefix}input_layernorm.weight": 1 + noise((size,), 23),
        f"{prefix}hidden_norm.weight": 1 + noise((size,), 24),
        "norm.weight": 1 + noise((size,), 25),
        "lm_head.weight": noise((len(own), size), 26),
        "d2t": own - torch.arange(len(own)),
        "t2d": in_own,
        **layer_tensors(fields, 2 * size, prefix),
        **(changes or {}),
    }
    more = {"draft_vocab_size": len(own)}
    if layers is not None:
        more["eagle_aux_hidden_state_layer_ids"] = list(layers)
    if not speculators:
        fields["architectures"] = ["LlamaForCausalLMEagle3"]
        return write_head(folder, fields | more, tensors, file="pytorch_model.bin")
    tensors["embed_tokens.weight"] = noise((spec.vocab_size, size), 27)
    return write_head(
        folder,
        speculators_config("eagle3", fields, norm_before_residual=True, **more),
        tensors,
        file="model.safetensors",
    )


def speculators_config(
    kind: str, fields: Mapping[str, object], **more: object
) -> dict[str, object]:
    """config.json in the Speculators format."""
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "tiny/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": dict(fields),
    } | more


def sure_medusa(folder: Path, target: Path, *, num_heads: int) -> Path:
    """Medusa heads for a permuted target: head i says the token i + 2 after the one it reads."""
    spec = load_spec(target)
    tensors = {
        name: torch.zeros_like(tensor)
        for name, tensor in medusa_tensors(spec, num_heads=num_heads).items()
    }
    for head in range(num_heads):
        tensors[f"{head}.1.weight"] = permutation(head + 2)
    config = {"medusa_num_heads": num_heads}
    return write_head(folder, config, tensors, file="medusa_lm_head.pt")


def silent_layer(config: Mapping[str, object], inputs: int, prefix: str) -> dict[str, Tensor]:
    """A layer that adds nothing."""
    tensors = layer_tensors(config, inputs, prefix)
    for name in (f"{prefix}self_attn.o_proj.weight", f"{prefix}mlp.down_proj.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    return tensors


def sure_eagle(folder: Path, target: Path, *, reads: str) -> Path:
    """An EAGLE head for a permuted target, which looks at the token alone or the state alone."""
    spec = load_spec(target)
    fc = torch.zeros(SIZE, 2 * SIZE)
    if reads == "token":
        fc[:, :SIZE] = 8 * torch.eye(SIZE)
    else:
        fc[:, SIZE:] = permutation(1)
    changes = {
        **silent_layer(layer_config(spec), SIZE, "layers.0."),
        "fc.weight": fc,
        "fc.bias": torch.zeros(SIZE),
    }
    return make_eagle(folder, target, changes=changes)


def sure_eagle3(folder: Path, target: Path, token_ids: Sequence[int]) -> Path:
    """An EAGLE-3 head for a permuted target.

    Its attention sees its own row only, and turns the state of the token before into that of the
    token: by taking away the one and adding the other. Anything else leaves both in the state. Its
    vocabulary is `token_ids`.
    """
    spec = load_spec(target)
    config = {"model_type": "mistral", "sliding_window": 1, "num_key_value_heads": 4}
    prefix = "midlayer."
    tensors = silent_layer(layer_config(spec, **config), 2 * SIZE, prefix)
    values = torch.zeros(SIZE, 2 * SIZE)
    values[:, :SIZE] = torch.eye(SIZE)  # of the token's embedding, normed: 8 times a unit vector
    values[:, SIZE:] = -torch.eye(SIZE)
    fc = torch.zeros(SIZE, 3 * SIZE)
    fc[:, SIZE : 2 * SIZE] = 8 * torch.eye(SIZE)
    ones = torch.ones(SIZE)
    tensors |= {
        f"{prefix}self_attn.v_proj.weight": values,
        f"{prefix}self_attn.o_proj.weight": torch.eye(SIZE),
        f"{prefix}input_layernorm.weight": ones,
        f"{prefix}hidden_norm.weight": ones,
        "norm.weight": ones,
        "fc.weight": fc,
        "lm_head.weight": permutation(1)[list(token_ids)],
    }
    return make_eagle3(folder, target, token_ids=token_ids, changes=tensors, **config)


def windowed_pair(folder: Path) -> tuple[Path, Path]:
    """A target of one layer whose rows see 4 tokens, and an EAGLE head that has its layer.

    Embeddings have a mean square of 1 and norms are ones: the head has no norm before its layer.
    """
    target = make_checkpoint(
        folder / "target",
        family="mistral",
        hidden_size=32,
        num_layers=1,
        sliding_window=4,
        max_position_embeddings=512,
        rope_theta=50000.0,
        tie_word_embeddings=False,
    )
    weights = load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(dim=1, keepdim=True).sqrt()
    for name in list(weights):
        if name.endswith("norm.weight"):
            weights[name] = torch.ones_like(weights[name])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    size = embedding.shape[1]
    changes = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    changes["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    changes["fc.bias"] = torch.zeros(size)
    head = make_eagle(
        folder / "head", target, changes=changes, model_type="mistral", sliding_window=4
    )
    return target, head
