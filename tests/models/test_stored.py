"""Weights on their way through an object store: the same bits, and only where they fit."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.errors import ConfigurationError
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder, load_spec
from cluster.models.stored import (
    StoredReader,
    StoredTensor,
    StoredWeights,
    check_same_model,
    load_stored,
    read_stored,
)
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("stored") / "model", vocab_size=300)


def logits(decoder: Decoder) -> torch.Tensor:
    tokens = torch.arange(9)
    cache = KVCache.of(decoder, num_blocks=1, block_size=64)
    return decoder.logits(decoder.forward(tokens, [Segment((0,), 0, len(tokens))], cache))


def through_a_store(weights: StoredWeights) -> StoredWeights:
    """As Ray does it: buffers apart, and read-only on the other side."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(weights, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 10_000
    sent = [bytes(buffer) for buffer in buffers]
    received: StoredWeights = pickle.loads(data, buffers=sent)  # noqa: S301 - made here
    return received


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_stored_weights_compute_what_the_folder_does(folder: Path, dtype: str) -> None:
    """To the last bit, out of memory that may only be read."""
    stored = through_a_store(read_stored(folder))
    assert not next(iter(stored.tensors.values())).data.flags.writeable
    decoder = load_stored(stored, load_spec(folder), dtype=dtype)
    assert torch.equal(logits(decoder), logits(load_decoder(folder, dtype=dtype)))


def test_what_is_loaded_does_not_depend_on_the_store() -> None:
    """The store's memory may go away: a copy is taken."""
    data = np.frombuffer(bytearray(torch.ones(4).numpy().tobytes()), np.uint8)
    tensor = StoredTensor("float32", (2, 2), data).tensor()
    data[:] = 0
    assert torch.equal(tensor, torch.ones(2, 2))


def test_parts_are_parts_of_the_whole() -> None:
    """Rows and columns by ranges; a name that is not there is an error of ours."""
    values = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    stored = StoredTensor("bfloat16", (3, 4), values.view(torch.uint8).reshape(-1).numpy())
    reader = StoredReader(StoredWeights({"w": stored}), dtype=torch.float32, device="cpu")
    assert torch.equal(reader.whole("w"), values.float())
    assert torch.equal(reader.rows("w", range(1, 3)), values.float()[1:3])
    assert torch.equal(reader.columns("w", range(2, 3)), values.float()[:, 2:3])
    with pytest.raises(ConfigurationError, match="'v'"):
        reader.whole("v")


def test_weights_of_another_model_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """What differs in the arithmetic is said; other numbers of the same shapes are welcome."""
    check_same_model(make_checkpoint(tmp_path / "same", vocab_size=300, seed=1), like=folder)
    deeper = make_checkpoint(tmp_path / "deeper", vocab_size=300, num_layers=3)
    with pytest.raises(ConfigurationError, match=r"num_layers: 3 in .*deeper.*, 2 in the model"):
        check_same_model(deeper, like=folder)
    larger = make_checkpoint(tmp_path / "larger", vocab_size=301)
    with pytest.raises(ConfigurationError, match="vocab_size: 301"):
        check_same_model(larger, like=folder)


def test_a_tensor_of_another_shape_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """A config may be right and the file behind it not."""
    mixed = make_checkpoint(tmp_path / "mixed", vocab_size=300, hidden_size=32)
    (mixed / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigurationError, match=r"weight '.*': shape \(300, 32\) in "):
        check_same_model(mixed, like=folder)
