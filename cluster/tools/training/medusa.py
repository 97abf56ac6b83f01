"""Medusa heads in training (arXiv:2401.10774): one residual block each, on the last state."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from cluster.tools.training.batches import Batch
from cluster.tools.training.trainee import Teacher, Trainee


class _Block(nn.Module):
    """Adds nothing at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = rows + functional.silu(self.linear(rows))
        return out


class MedusaTrainee(Trainee):
    """Trains the blocks; every head's vocabulary is the target's own `head`, `[vocab, hidden]`."""

    def __init__(self, teacher: Teacher, *, num_depths: int, head: Tensor, verifier: str) -> None:
        super().__init__(teacher)
        self.num_depths = num_depths
        self._head = head
        self._verifier = verifier
        size = head.shape[1]
        self.blocks = nn.ModuleList([_Block(size) for _ in range(num_depths)])

    def states(self, batch: Batch, num_depths: int) -> list[Tensor]:
        """All of the anchor's own state."""
        size = self._head.shape[1]
        known = self.teacher.states(batch.hidden[:, :-2, -size:])
        rows = known.shape[1]
        return [
            block(known[:, : rows - depth])
            for depth, block in enumerate(self.blocks)
            if depth < num_depths
        ]

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """The target's head."""
        del depth
        return functional.linear(states, self.teacher.head)

    @property
    def weights_per_token(self) -> int:
        """A block's, and the whole vocabulary's."""
        return self._head.shape[1] ** 2 + self._head.numel()

    def write(self, folder: Path) -> None:
        """In the published layout: every head with a vocabulary of its own."""
        tensors: dict[str, Tensor] = {}
        for depth, block in enumerate(self.blocks):
            for name, each in block.state_dict().items():
                tensors[f"{depth}.0.{name}"] = each.detach().cpu().contiguous()
            tensors[f"{depth}.1.weight"] = self._head.detach().cpu().to(torch.float32).clone()
        save_file(tensors, folder / "medusa_lm_head.safetensors", metadata={"format": "pt"})
        config = {
            "medusa_num_heads": self.num_depths,
            "medusa_num_layers": 1,
            "base_model_name_or_path": self._verifier,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
