"""A checkpoint's weights as plain bytes: read once into an object store, mapped by whoever loads.

folder ──read_stored──> StoredWeights ──object store──> StoredWeights.reader ──> build_decoder
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.errors import ConfigurationError
from cluster.models.decoder import Decoder
from cluster.models.load import DTYPES, build_decoder
from cluster.models.spec import ModelSpec, load_spec
from cluster.models.weights import Weights


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's elements as bytes, `[size]` uint8, which may be memory that is only to be read."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def tensor(self) -> Tensor:
        """A copy that depends on no store."""
        # torch does not take memory that it must not write to, even to read it.
        flat = torch.from_numpy(np.array(self.data))
        dtype: torch.dtype = getattr(torch, self.dtype)
        return flat.view(dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Every tensor of a checkpoint by its name, in the checkpoint's own dtypes."""

    tensors: Mapping[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


class StoredReader:
    """Named weights out of StoredWeights, in one dtype and on one device."""

    def __init__(self, stored: StoredWeights, *, dtype: torch.dtype, device: str) -> None:
        self._stored = stored
        self._dtype = dtype
        self._device = device

    def whole(self, name: str) -> Tensor:
        """All of it."""
        if name not in self._stored.tensors:
            raise ConfigurationError(f"no weight {name!r}")
        return self._stored.tensors[name].tensor().to(device=self._device, dtype=self._dtype)

    def rows(self, name: str, rows: range) -> Tensor:
        """Some entries of the first dimension."""
        return self.whole(name)[rows.start : rows.stop]

    def columns(self, name: str, columns: range) -> Tensor:
        """Some entries of the second dimension."""
        return self.whole(name)[:, columns.start : columns.stop]


def read_stored(folder: Path) -> StoredWeights:
    """All weights of a folder of safetensors. Raises ConfigurationError."""
    with Weights(folder, dtype=None, device="cpu") as weights:
        return StoredWeights({name: _stored(weights.whole(name)) for name in weights.names})


def load_stored(
    stored: StoredWeights, spec: ModelSpec, *, dtype: str, device: str = "cpu"
) -> Decoder:
    """The decoder of stored weights. Raises ConfigurationError."""
    reader = StoredReader(stored, dtype=DTYPES[dtype], device=device)
    return build_decoder(spec, reader, dtype=dtype, device=device)


def check_same_model(folder: Path, *, like: Path) -> None:
    """Pass if a folder's weights can take the place of another's while it runs.

    Raises ConfigurationError naming what differs first: of the arithmetic, or of the tensors.
    """
    spec, running = load_spec(folder), load_spec(like)
    for field in fields(ModelSpec):
        ours, theirs = getattr(running, field.name), getattr(spec, field.name)
        if ours != theirs:
            raise ConfigurationError(
                f"{field.name}: {theirs} in {str(folder)!r}, {ours} in the model that runs"
            )
    shapes, running_shapes = _shapes(folder), _shapes(like)
    if spec.tied_head:  # some are written with a head nevertheless
        shapes.pop("lm_head.weight", None)
        running_shapes.pop("lm_head.weight", None)
    for name in sorted(shapes.keys() | running_shapes.keys()):
        if shapes.get(name) != running_shapes.get(name):
            raise ConfigurationError(
                f"weight {name!r}: shape {shapes.get(name)} in {str(folder)!r}, "
                f"{running_shapes.get(name)} in the model that runs"
            )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with Weights(folder, dtype=None, device="cpu") as weights:
        return {name: weights.shape(name) for name in weights.names}


def _stored(weight: Tensor) -> StoredTensor:
    data = weight.contiguous().reshape(-1).view(torch.uint8).numpy()
    return StoredTensor(str(weight.dtype).removeprefix("torch."), tuple(weight.shape), data)
