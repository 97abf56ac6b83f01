"""Reading published heads: their config.json, and tensors that have to be of the right shapes."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cluster.errors import ConfigurationError


class HeadWeights:
    """The tensors of a head by name, in one dtype and on one device.

    `renamed` has for beginnings of names what these are called here.
    """

    def __init__(
        self,
        folder: Path,
        file_names: Sequence[str],
        *,
        dtype: torch.dtype,
        device: str,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.file = _first_file(folder, file_names)
        self._dtype = dtype
        self._device = device
        self._tensors = {
            _renamed(name, renamed or {}): tensor for name, tensor in _read(self.file).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name. Raises ConfigurationError unless it has that shape."""
        return self.as_stored(name, shape).to(device=self._device, dtype=self._dtype)

    def as_stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same in the checkpoint's own dtype, and on the CPU."""
        if name not in self._tensors:
            raise ConfigurationError(f"head {str(self.file)!r}: no weight {name!r}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"head {str(self.file)!r}: {name} is {list(tensor.shape)}, and for this target "
                f"and config.json it has to be {list(shape)}"
            )
        return tensor


def stored_names(folder: Path, file_names: Sequence[str]) -> tuple[str, ...]:
    """What the tensors of a head are called."""
    return tuple(stored_sizes(folder, file_names))


def stored_sizes(folder: Path, file_names: Sequence[str]) -> dict[str, int]:
    """The number of elements of every tensor, none of which is read. Raises ConfigurationError."""
    file = _first_file(folder, file_names)
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as weights:
            return {
                name: prod(weights.get_slice(name).get_shape())
                for name in weights.keys()  # noqa: SIM118 - not a mapping
            }
    return {name: tensor.numel() for name, tensor in _read(file).items()}


def read_config(folder: Path) -> dict[str, Any]:
    """A head's config.json. Raises ConfigurationError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"head {str(folder)!r}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"head {str(folder)!r}: config.json is no object")
    return config


def positive(config: Mapping[str, Any], field: str, default: int, *, folder: Path) -> int:
    """A whole number above 0 of a config. Raises ConfigurationError."""
    value = config.get(field, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"head {str(folder)!r}: {field} is {value!r}, not 1 or more")
    return value


def _first_file(folder: Path, file_names: Sequence[str]) -> Path:
    for name in file_names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigurationError(f"head {str(folder)!r}: none of {', '.join(file_names)}")


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling raises whatever it likes
        raise ConfigurationError(f"head {str(file)!r}: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for beginning, instead in renamed.items():
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)
    return name
