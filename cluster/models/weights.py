"""The weights of a folder of safetensors, read whole or in part."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from cluster.errors import ConfigurationError

SHARDED = "model.safetensors.index.json"


class NamedWeights(Protocol):
    """Named tensors, whole or in part. Raises ConfigurationError for a name that is not there."""

    def whole(self, name: str) -> Tensor:
        """All of it."""
        ...

    def rows(self, name: str, rows: range) -> Tensor:
        """Some entries of the first dimension."""
        ...

    def columns(self, name: str, columns: range) -> Tensor:
        """Some entries of the second dimension."""
        ...


class Weights:
    """Named tensors, from whichever file holds them, in one dtype and on one device.

    A dtype of None leaves each as it was written. A part is read without the rest. Everything
    raises ConfigurationError for a name that is not there. Close it by leaving it as a context.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype | None, device: str) -> None:
        self._folder = folder
        self._dtype = dtype
        self._holders: dict[str, Any] = {}
        with ExitStack() as stack:
            for name in _file_names(folder):
                if not (folder / name).is_file():
                    raise ConfigurationError(f"model {str(folder)!r}: no {name}")
                file = stack.enter_context(safe_open(folder / name, framework="pt", device=device))
                self._holders.update(dict.fromkeys(file.keys(), file))
            self._files = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all there are."""
        return tuple(self._holders)

    def shape(self, name: str) -> tuple[int, ...]:
        """How large one is, without reading it."""
        return tuple(self._holder(name).get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """All of it."""
        return self._as_asked(self._holder(name).get_tensor(name))

    def rows(self, name: str, rows: range) -> Tensor:
        """Some entries of the first dimension."""
        return self._as_asked(self._holder(name).get_slice(name)[rows.start : rows.stop])

    def columns(self, name: str, columns: range) -> Tensor:
        """Some entries of the second dimension."""
        return self._as_asked(self._holder(name).get_slice(name)[:, columns.start : columns.stop])

    def _holder(self, name: str) -> Any:  # noqa: ANN401 - safetensors has no types
        if name not in self._holders:
            raise ConfigurationError(f"model {str(self._folder)!r}: no weight {name!r}")
        return self._holders[name]

    def _as_asked(self, weight: Tensor) -> Tensor:
        return weight if self._dtype is None else weight.to(self._dtype)


def _file_names(folder: Path) -> list[str]:
    index = folder / SHARDED
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return ["model.safetensors"]
