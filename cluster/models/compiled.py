"""The compiled kernels behind tensors: float32 on CPUs, with weights in float32 or int8.

They are there where numba is, and OpenMP for its threads. Threads are as many as torch has.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from cluster.models.hidden import Taps
from cluster.models.kv_cache import KVCache
from cluster.models.spec import ModelSpec

PARALLEL_FROM = 100_000  # products: fewer take less time than calling a second thread


@cache
def is_available() -> bool:
    """Whether kernels can be compiled here, for any number of calling threads at once."""
    if find_spec("numba") is None:
        return False
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError:  # no OpenMP: what else there is may not be called by two threads at once
        return False
    return True


def prepare() -> None:
    """Compile now what would be compiled on first use."""
    _kernels()


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether activations of that kind are the kernels'."""
    return (device.type, dtype) == ("cpu", torch.float32) and is_available()


class _Layer(Protocol):
    """Of a decoder."""

    @property
    def input_norm(self) -> Tensor | None: ...
    @property
    def qkv(self) -> object: ...
    @property
    def output(self) -> object: ...
    @property
    def mlp_norm(self) -> Tensor | None: ...
    @property
    def gate_up(self) -> object: ...
    @property
    def down(self) -> object: ...


class CompiledLinear:
    """float32 weights in blocks of outputs, each of which streams by once for all rows.

    `addresses` are those of weights, scales and bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        self._num_outputs, num_inputs = weight.shape
        self._kept = (_in_blocks(weight), scales, None if bias is None else bias.contiguous())
        self.addresses = tuple(map(_address, self._kept))
        at, *others = self.addresses
        self._arguments = (num_inputs, at, self._num_outputs, *others)

    def __call__(self, rows: Tensor) -> Tensor:
        """The product."""
        return self._product(rows, 0)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` plus the product."""
        residual = residual.contiguous()
        return self._product(rows, residual.data_ptr())

    def _product(self, rows: Tensor, residual: int) -> Tensor:
        rows, num_rows = rows.contiguous(), len(rows)
        out = torch.empty((num_rows, self._num_outputs))
        arguments = (rows.data_ptr(), num_rows, *self._arguments, residual, out.data_ptr())
        num_threads = _num_threads()
        if num_threads == 1:
            _kernels().linear_alone(*arguments)
        else:
            _kernels().linear(*arguments, num_threads)
        return out


class CompiledInt8Linear(CompiledLinear):
    """int8 weights scaled by output; activations stay what they are."""

    def __init__(self, levels: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        filled = torch.nn.functional.pad(scales, (0, -len(scales) % _kernels().BLOCK))
        super().__init__(levels, bias, filled)


class CompiledPlan:
    """Where a step's rows stand, and their attention."""

    def __init__(
        self,
        spec: ModelSpec,
        cache: KVCache,
        *,
        positions: Sequence[int],
        slots: Sequence[int],
        tables: Sequence[Sequence[int]],
        owners: Sequence[int],
    ) -> None:
        """Row i stands at `positions[i]` of the sequence whose blocks are `tables[owners[i]]`."""
        width = max(map(len, tables))
        self.positions = torch.tensor(positions)
        self._slots = torch.tensor(slots)
        self._tables = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables])
        self._owners = torch.tensor(owners)
        self._shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._layers = cache.layers
        self._windows = [window or 0 for window in spec.sliding_windows]
        products = spec.num_heads * spec.head_dim * (sum(positions) + len(positions))
        self._is_small = products < PARALLEL_FROM
        self._own = (
            self.positions.data_ptr(),
            self._tables.data_ptr(),
            self._owners.data_ptr(),
            width,
            cache.block_size,
            cache.block_stride,
        )

    @property
    def where(self) -> tuple[int, ...]:
        """The cache and its bytes of a layer; then where rows are entered, and where they stand."""
        layers = self._layers
        return layers.data_ptr(), 4 * layers.stride(0), self._slots.data_ptr(), *self._own

    @property
    def num_threads(self) -> int:
        """That attend."""
        return 1 if self._is_small else _num_threads()

    def attend(self, heads: Tensor, factors: Tensor, layer: int) -> Tensor:
        """As `attention.AttentionPlan.attend`."""
        kernels = _kernels()
        heads = heads.contiguous()
        num_rows = len(heads)
        cache, layer_bytes, slots, *own = self.where
        address = cache + layer * layer_bytes
        kernels.enter(heads.data_ptr(), factors.data_ptr(), num_rows, *self._shape, address, slots)
        out = torch.empty((num_rows, self._shape[0] * self._shape[2]))
        arguments = (
            heads.data_ptr(),
            num_rows,
            *self._shape,
            address,
            *own,
            self._windows[layer],
            out.data_ptr(),
        )
        num_threads = self.num_threads
        if num_threads == 1:
            kernels.attend_alone(*arguments)
        else:
            kernels.attend(*arguments, num_threads)
        return out


class CompiledLayers:
    """All layers of a model in one call, where they are made of what is compiled and nothing else.

    Between calls of kernels an interpreter would have to be fetched into caches that weights have
    just swept.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[_Layer]) -> None:
        rows = []
        for layer, window in zip(layers, spec.sliding_windows, strict=True):
            row: list[int] = []
            for linear in _linears(layer):
                assert isinstance(linear, CompiledLinear)
                row += linear.addresses
            row += [_address(layer.input_norm), _address(layer.mlp_norm), window or 0]
            rows.append(row)
        self._table = torch.tensor(rows)
        self._layers = tuple(layers)  # whose memory the table points to
        self._epsilon = spec.rms_norm_eps
        self._sizes = (
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
        )

    @classmethod
    def of(cls, spec: ModelSpec, layers: Sequence[_Layer]) -> Self | None:
        """The layers, if they are of that kind: none of several ranks, no norm of queries."""
        linears = (linear for layer in layers for linear in _linears(layer))
        if spec.qk_norm or not all(isinstance(each, CompiledLinear) for each in linears):
            return None
        return cls(spec, layers)

    def __call__(
        self, hidden: Tensor, factors: Tensor, plan: CompiledPlan, taps: Taps | None = None
    ) -> Tensor:
        """`[rows, hidden]` through all layers, in place, stopping where there are taps."""
        hidden = hidden.contiguous()
        first, count = 0, len(self._layers)
        for stop in (*(taps.layers if taps else ()), count):
            if stop > first:
                self._run(hidden, factors, plan, range(first, stop))
                first = stop
            if taps and stop in taps.layers:
                taps.offer(stop, hidden.clone())
        return hidden

    def _run(self, hidden: Tensor, factors: Tensor, plan: CompiledPlan, layers: range) -> None:
        table = self._table[layers.start]
        cache, layer_bytes, *where = plan.where
        _kernels().layers(
            table.data_ptr(),
            len(layers),
            hidden.data_ptr(),
            len(hidden),
            *self._sizes,
            factors.data_ptr(),
            cache + layers.start * layer_bytes,
            layer_bytes,
            *where,
            _num_threads(),
            plan.num_threads,
            self._epsilon,
        )


def _linears(layer: _Layer) -> tuple[object, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


class CompiledPointwise:
    """As `pointwise.TorchPointwise`."""

    def norm(self, rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """RMSNorm."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        size = rows.shape[-1]
        _kernels().norm(rows.data_ptr(), len(rows), size, _address(weight), epsilon, out.data_ptr())
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up`."""
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((num_rows, size))
        _kernels().swiglu(gate_up.data_ptr(), num_rows, size, out.data_ptr())
        return out


def candidates(
    estimates: Tensor, bounds: Tensor, lengths: Tensor, *, most: int
) -> tuple[Tensor, Tensor] | None:
    """Rows and columns of what could be the largest of its row; None for more than `most`.

    `estimates` is `[rows, columns]`, each off by up to `lengths[row] * bounds[column]`.
    """
    rows, columns = torch.empty(2, most, dtype=torch.int64)
    num = _kernels().candidates(
        estimates.data_ptr(),
        *estimates.shape,
        bounds.data_ptr(),
        lengths.data_ptr(),
        rows.data_ptr(),
        columns.data_ptr(),
        most,
    )
    return (rows[:num], columns[:num]) if num <= most else None


def products(rows: Tensor, which: Tensor, weight: Tensor, outputs: Tensor) -> Tensor:
    """What a linear of `weight` would have for some outputs of some rows, to the bit: `[places]`.

    `which` rows and which `outputs`, one of each for a place.
    """
    kernels = _kernels()
    size, num = rows.shape[1], len(which)
    which, outputs = (
        torch.nn.functional.pad(each, (0, -num % kernels.LANES)) for each in (which, outputs)
    )
    left = rows.data_ptr() + 4 * size * which
    right = weight.data_ptr() + 4 * size * outputs
    out = torch.empty(len(left))
    kernels.products(left.data_ptr(), right.data_ptr(), len(left), size, out.data_ptr())
    return out[:num]


def _in_blocks(weight: Tensor) -> Tensor:
    """`[out, in]` to `[blocks, in, BLOCK]`, the last block filled up with zeros."""
    block = _kernels().BLOCK
    num_outputs, num_inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -num_outputs % block))
    return filled.view(-1, block, num_inputs).transpose(1, 2).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _num_threads() -> int:
    """As many as torch has, and the compiled kernels' pool."""
    numba = _numba()
    wanted = torch.get_num_threads()
    if numba.get_num_threads() != wanted:
        wanted = min(wanted, numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(wanted)
    return wanted


@cache
def _numba() -> Any:  # noqa: ANN401 - it has no types
    return import_module("cluster.jit").numba


@cache
def _kernels() -> Any:  # noqa: ANN401 - as above
    """All of them, compiled."""
    return import_module("cluster.models.kernels")
