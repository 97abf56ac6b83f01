"""What lies between matrix products and knows neither of sequences nor of weights' layouts."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cluster.models.compiled import CompiledPointwise, serves


class Pointwise(Protocol):
    """Every row by itself."""

    def norm(self, rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """RMSNorm of `[rows, size]`, in float32; `weight` is `[size]` or 1."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[rows, 2 * size]`, whose first half is the gate."""
        ...


class TorchPointwise:
    """On any device, in any dtype."""

    def norm(self, rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """RMSNorm."""
        return rms_norm(rows, weight, epsilon)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up`."""
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = functional.silu(gate).mul_(up)
        return activated


def pointwise_for(device: torch.device, dtype: torch.dtype) -> Pointwise:
    """What is fastest for such activations."""
    return CompiledPointwise() if serves(device, dtype) else TorchPointwise()


def rms_norm(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, in float32, of a tensor of any shape."""
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
    scale = (length * length / rows.shape[-1] + epsilon).rsqrt_()
    normed: Tensor = (rows * scale).to(rows.dtype)
    return normed if weight is None else normed.mul_(weight)
