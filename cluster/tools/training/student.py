"""A small model in training: some of the target's layers, or any model of the same vocabulary."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from cluster.tools.training.batches import Batch
from cluster.tools.training.trainee import Teacher, Trainee

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja")


def whole_model(folder: Path) -> Any:  # noqa: ANN401 - transformers' model
    """A model as it is."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def few_layers(folder: Path, layers: Sequence[int]) -> Any:  # noqa: ANN401 - transformers' model
    """A model of these layers of a target; its embedding and head are frozen."""
    model = whole_model(folder)
    model.model.layers = nn.ModuleList([model.model.layers[layer] for layer in layers])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    config = model.config
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[layer] for layer in layers]
    for frozen in (model.get_input_embeddings(), model.get_output_embeddings()):
        frozen.requires_grad_(requires_grad=False)
    return model


class StudentTrainee(Trainee):
    """Reads tokens alone. Every token is a first one to it: what came before is the text."""

    num_depths = 1

    def __init__(self, teacher: Teacher, model: Any, *, tokenizer_of: Path) -> None:  # noqa: ANN401
        super().__init__(teacher)
        self.model = model
        self._tokenizer_of = tokenizer_of

    def states(self, batch: Batch, num_depths: int) -> list[Tensor]:
        """One pass has all: row i is of token i, and says the next."""
        mask = torch.arange(batch.token_ids.shape[1], device=batch.lengths.device)
        inside = (mask < batch.lengths[:, None]).long()
        rows = self.model.model(
            input_ids=batch.token_ids, attention_mask=inside, use_cache=False
        ).last_hidden_state
        return [rows[:, 1 + depth : -1] for depth in range(num_depths)]

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """The model's own head, of the teacher's tokens."""
        del depth
        head = self.model.get_output_embeddings().weight
        return functional.linear(states, head[self.teacher.token_ids])

    @property
    def weights_per_token(self) -> int:
        """The layers', and the whole vocabulary's."""
        layers: int = sum(each.numel() for each in self.model.model.layers.parameters())
        head: int = self.model.get_output_embeddings().weight.numel()
        return layers + head

    def write(self, folder: Path) -> None:
        """As transformers writes it, with the target's tokenizer."""
        self.model.save_pretrained(folder)
        for pattern in TOKENIZER_FILES:
            for file in self._tokenizer_of.glob(pattern):
                shutil.copy(file, folder)
