"""An EAGLE-3 head in training (arXiv:2503.01840), written out in the Speculators format.

It learns on what it will draft from: from the second token of a draft on, its own states stand
where the target's are not known yet. Row i of pass j ends a draft whose last j rows are its own:

    pass 0   row i sees rows 0..i of pass 0                      all of the target's states
    pass 1   row i sees rows 0..i-1 of pass 0, and itself
    pass 2   row i sees rows 0..i-2 of pass 0, i-1 of pass 1, and itself
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from cluster.models.weights import NamedWeights
from cluster.tools.training.batches import Batch
from cluster.tools.training.trainee import Teacher, Trainee

FIRST_SPREAD = 0.02  # of weights that have nothing to begin with
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
)


def layer_config(target: dict[str, Any]) -> LlamaConfig:
    """The one layer's, in the sizes of a target's config.json."""
    fields = {name: target[name] for name in LAYER_FIELDS if target.get(name) is not None}
    return LlamaConfig(**fields, num_hidden_layers=1, tie_word_embeddings=False)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, size = config.head_dim, config.hidden_size
        self._shape = (config.num_attention_heads, config.num_key_value_heads, width)
        self.q_proj = nn.Linear(2 * size, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, size, bias=False)

    def forward(
        self, rows: Tensor, factors: tuple[Tensor, Tensor], before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attend as the last of the passes whose keys and values are `before`; adds its own."""
        queries, keys, values = self._heads(rows, factors)
        before.append((keys, values))
        depth = len(before) - 1
        if not depth:
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True
            )
        else:
            attended = _attend(queries, before)
        merged: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, rows: Tensor, factors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, `[n, heads, rows, width]`, as many of each."""
        num_heads, num_kv_heads, width = self._shape
        queries, keys, values = (
            linear(rows).unflatten(-1, (-1, width)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *factors)
        shared = num_heads // num_kv_heads
        return (
            queries,
            keys.repeat_interleave(shared, dim=1),
            values.repeat_interleave(shared, dim=1),
        )


def _attend(queries: Tensor, passes: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the last pass, to the rows of the first and to one row of each of the others."""
    depth = len(passes) - 1
    scale = queries.shape[-1] ** -0.5
    keys, values = passes[0]
    num_rows = queries.shape[2]
    hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=queries.device).triu(1 - depth)
    settled = (queries @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
    own = [_shifted(each, depth - at) for at, (each, _) in enumerate(passes[1:], start=1)]
    drafted = torch.stack([(queries * each).sum(-1) for each in own], dim=-1)
    weights = functional.softmax(torch.cat([settled, drafted], dim=-1) * scale, dim=-1)
    attended = weights[..., :num_rows] @ values
    for at, (_, each) in enumerate(passes[1:], start=1):
        own_weight = weights[..., num_rows + at - 1].unsqueeze(-1)
        attended = attended + own_weight * _shifted(each, depth - at)
    return attended


def _shifted(rows: Tensor, count: int) -> Tensor:
    """Row i is what row i - count was; the first ones are zeros, and nobody's."""
    return functional.pad(rows[:, :, : rows.shape[2] - count], (0, 0, count, 0)) if count else rows


class _Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return down


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, epsilon)
        self.hidden_norm = nn.RMSNorm(size, epsilon)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, epsilon)
        self.mlp = _Mlp(config)

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        factors: tuple[Tensor, Tensor],
        before: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        rows = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(rows, factors, before)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleTrainee(Trainee):
    """Trains the fusion and the layer; embedding and head are the target's, and stay as they are.

    `layers` are the target's whose inputs it reads; the corpus has these, and the last one's.
    """

    embedding: Tensor

    def __init__(
        self,
        teacher: Teacher,
        *,
        config: LlamaConfig,
        layers: tuple[int, ...],
        embedding: Tensor,
        num_depths: int,
        verifier: str,
    ) -> None:
        super().__init__(teacher)
        size = config.hidden_size
        self.num_depths = num_depths
        self._config = config
        self._layers = layers
        self._verifier = verifier
        self.fc = nn.Linear(len(layers) * size, size, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self._rotary = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def begin_from(self, target: NamedWeights, *, last_layer: int) -> None:
        """Begin with the target's last layer on the highest states, and not with noise."""
        prefix, size = f"model.layers.{last_layer}.", self._config.hidden_size
        layer = self.layers[0]
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"):
            layer.get_parameter(f"{name}.weight").copy_(target.whole(f"{prefix}{name}.weight"))
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = layer.get_parameter(f"self_attn.{name}.weight")
            nn.init.normal_(weight[:, :size], std=FIRST_SPREAD)
            weight[:, size:].copy_(target.whole(f"{prefix}self_attn.{name}.weight"))
        for own, theirs in (
            ("hidden_norm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            layer.get_parameter(f"{own}.weight").copy_(target.whole(f"{prefix}{theirs}.weight"))
        self.norm.weight.copy_(target.whole("model.norm.weight"))
        nn.init.normal_(self.fc.weight, std=FIRST_SPREAD)
        self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device)

    def states(self, batch: Batch, num_depths: int) -> list[Tensor]:
        """Pass after pass, each fed with what the one before returned."""
        size = self._config.hidden_size
        known = batch.hidden[:, :-2, : len(self._layers) * size]
        embedded = functional.embedding(batch.token_ids[:, 1:-1], self.embedding)
        positions = torch.arange(known.shape[1], device=known.device)[None]
        factors = self._rotary(known, positions)
        features = self.fc(known)
        before: list[tuple[Tensor, Tensor]] = []
        found = []
        for depth in range(num_depths):
            out = self.layers[0](embedded, features, factors, before)
            found.append(out[:, depth:])
            features = functional.pad(out[:, :-1], (0, 0, 1, 0))
        return found

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """The target's head on the layer's states, under a norm of its own."""
        del depth
        return functional.linear(self.norm(states), self.teacher.head)

    @property
    def weights_per_token(self) -> int:
        """The layer's, and its vocabulary's."""
        layer = sum(each.numel() for each in self.layers.parameters())
        return layer + self.teacher.head.numel()

    def write(self, folder: Path) -> None:
        """config.json and model.safetensors, with the parts of the target that it needs."""
        token_ids, vocab_size = self.teacher.token_ids.cpu(), self._config.vocab_size
        in_own = torch.zeros(vocab_size, dtype=torch.bool)
        in_own[token_ids] = True
        tensors = {name: each.detach().cpu() for name, each in self.state_dict().items()} | {
            "lm_head.weight": self.teacher.head.cpu(),
            "d2t": token_ids - torch.arange(len(token_ids)),
            "t2d": in_own,
        }
        contiguous = {name: each.contiguous() for name, each in tensors.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.num_depths}
                ],
                "verifier": {
                    "name_or_path": self._verifier,
                    "architectures": ["LlamaForCausalLM"],
                },
            },
            "draft_vocab_size": len(token_ids),
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(self._layers),
            "transformer_layer_config": self._config.to_diff_dict() | {"model_type": "llama"},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
