"""The tiny models that most engines here stand on."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conformance.lab import Lab


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: in models this small several only wait for each other."""
    import torch  # noqa: PLC0415 - tests of fakes need no torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def lab(checkpoints: dict[str, Path], one_thread: None) -> "Lab":
    """One lab for the module, with the target's tokenizer."""
    del one_thread
    from cluster.models.load import load_decoder  # noqa: PLC0415 - as above
    from tests.conformance.lab import Lab  # noqa: PLC0415 - as above

    decoders = {name: load_decoder(path, dtype="float32") for name, path in checkpoints.items()}
    return Lab(decoders, checkpoints["target"])
