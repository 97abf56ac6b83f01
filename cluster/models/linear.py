"""Linear layers, one kind for each (device, dtype), whose rows do not know of one another.

Plain `F.linear` on a CPU rounds a row differently from row count to row count, and eight rows
cost twice one. Compiled kernels do neither. Where there are none, a library that multiplies by
weights it laid out once serves: MKL or oneDNN, whichever has that row count change no bit.
"""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cluster.errors import ConfigurationError
from cluster.models import compiled

ROWS_HINT = 8  # the row count oneDNN lays weights out for; with 1, one row rounds differently
PACK_HINT = 64  # the row count MKL packs for; with fewer, more than eight rows take longer
INT8_LEVELS = 127
INT8_ZERO_POINT = 128
SMALLEST = torch.finfo(torch.float32).tiny  # keeps a row of zeros from dividing by zero

# The operators on weights laid out once have no public name.
_pack = torch.ops.mkl._mkl_reorder_linear_weight  # noqa: SLF001
_mkl_linear = torch.ops.mkl._mkl_linear  # noqa: SLF001
_reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
_onednn_linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001


class Linear(Protocol):
    """`y = x W^T + bias`, rows `[num_rows, in]` to `[num_rows, out]`, two rows or more."""

    def __call__(self, rows: Tensor) -> Tensor:
        """The product."""
        ...

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` plus the product."""
        ...


class PlainLinear:
    """The framework's own."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """The product."""
        return functional.linear(rows, self._weight, self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` plus the product."""
        return residual + self(rows)


class PackedLinear:
    """float32 on a CPU with AVX-512 and MKL: its matrix product over weights packed once.

    The packed form serves any number of rows from two on with the same bits. (MKL sums a row that
    is alone in another order; and with AVX2, all rows beyond a multiple of four of the first 11.)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _pack(weight.contiguous(), PACK_HINT)
        # The operator takes the plain weight too, for row counts other than the one it is told;
        # it is always told the right one, so a shape without memory will do.
        self._shape = torch.zeros(()).expand(weight.shape)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """The product."""
        product: Tensor = _mkl_linear(rows, self._packed, self._shape, self._bias, len(rows))
        return product

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` plus the product."""
        return self(rows).add_(residual)


class ReorderedLinear:
    """float32 on other CPUs: oneDNN over weights laid out once.

    It too may sum a row that is alone, over many inputs, in another order than two or more.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = _reorder(weight.contiguous(), ROWS_HINT)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """The product."""
        product: Tensor = _onednn_linear(rows, self._weight, self._bias, "none", [], "")
        return product

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` plus the product."""
        total: Tensor = _onednn_linear.binary(rows, residual, self._weight, self._bias, "add")
        return total


class RowwiseInt8Linear:
    """int8 weights scaled by output, activations by row: a row's scale is its own maximum.

    One scale for the whole batch would make a row as coarse as its largest neighbour.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        levels, scales = rowwise_int8(weight)
        with warnings.catch_warnings():
            # The prepacked form takes a quantised tensor, and making one is announced to go away.
            warnings.filterwarnings("ignore", message=".*deprecated", category=UserWarning)
            quantized = torch._make_per_channel_quantized_tensor(  # noqa: SLF001 - no public maker
                levels, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0
            )
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """The product."""
        scales = rows.abs().amax(dim=-1, keepdim=True)
        scales.clamp_min_(SMALLEST)
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / scales, 1 / INT8_LEVELS, INT8_ZERO_POINT, self._packed
        )
        product *= scales
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` plus the product."""
        return self(rows).add_(residual)


def rowwise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight `[out, in]` as int8 levels of the same shape, and what a level is worth, `[out]`."""
    scales = weight.abs().amax(dim=1).clamp_min(SMALLEST) / INT8_LEVELS
    return torch.round(weight / scales[:, None]).to(torch.int8), scales


def at_least_two(rows: Tensor) -> Tensor:
    """The rows, or the only one twice."""
    return torch.cat([rows, rows]) if len(rows) == 1 else rows


MakeLinear = Callable[[Tensor, Tensor | None], Linear]


def float32_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest of float32 on this CPU."""
    if compiled.is_available():
        return compiled.CompiledLinear(weight, bias)
    return library_linear(weight, bias)


def library_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest of float32 without the kernels that has no row change another's bits."""
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if is_wide and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return PackedLinear(weight, bias)
    return ReorderedLinear(weight, bias)


def int8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest of int8 on this CPU."""
    if compiled.is_available():
        return compiled.CompiledInt8Linear(*rowwise_int8(weight), bias)
    return RowwiseInt8Linear(weight, bias)


LINEARS: dict[tuple[str, str], MakeLinear] = {
    ("cpu", "float32"): float32_linear,
    ("cpu", "int8"): int8_linear,
    ("cpu", "bfloat16"): PlainLinear,
    ("cpu", "float16"): PlainLinear,
    ("cuda", "float32"): PlainLinear,
    ("cuda", "bfloat16"): PlainLinear,
    ("cuda", "float16"): PlainLinear,
}


def linear_for(device: str, dtype: str) -> MakeLinear:
    """The kind of linear layer for a device and a dtype. Raises ConfigurationError."""
    kind = (torch.device(device).type, dtype)
    if kind not in LINEARS:
        known = ", ".join(f"{name} on {where}" for where, name in LINEARS)
        raise ConfigurationError(
            f"dtype {dtype!r} on {device!r} is not supported; there is {known}"
        )
    return LINEARS[kind]
