"""The tiny models that most engines here stand on."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conformance.lab import Lab


@pytest.fixture(scope="module")
def lab(checkpoints: dict[str, Path], one_thread: None) -> "Lab":
    """One lab for the module, with the target's tokenizer."""
    del one_thread
    from cluster.models.load import load_decoder  # noqa: PLC0415 - tests of fakes need no torch
    from tests.conformance.lab import Lab  # noqa: PLC0415 - as above

    decoders = {name: load_decoder(path, dtype="float32") for name, path in checkpoints.items()}
    return Lab(decoders, checkpoints["target"])
