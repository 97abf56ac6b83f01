"""The layer-dropped copy of a checkpoint that other tests draft with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.drafters.vocabulary import check_same_tokenizer
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from tests.checkpoints import make_checkpoint
from tests.layer_dropped import drop_layers


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("original"), family="qwen3", num_layers=4, vocab_size=300
    )


def logits(folder: Path, *, leave_out: tuple[int, ...] = ()) -> torch.Tensor:
    """What a checkpoint makes of a short text, with some of its layers skipped."""
    decoder: Decoder = load_decoder(folder, dtype="float32")
    kept = [index for index in range(decoder.spec.num_layers) if index not in leave_out]
    decoder._layers = tuple(decoder._layers[index] for index in kept)
    windows = tuple(decoder.spec.sliding_windows[index] for index in kept)
    decoder.spec = replace(decoder.spec, num_layers=len(kept), sliding_windows=windows)
    cache = KVCache.of(decoder, num_blocks=1, block_size=64)
    rows = torch.arange(9)
    return decoder.logits(decoder.forward(rows, [Segment((0,), 0, 9)], cache))


def test_the_copy_is_the_original_without_those_layers(original: Path, tmp_path: Path) -> None:
    """Layers keep their weights and order, and the tokenizer is the same."""
    copy = drop_layers(original, [0, 2, 3], tmp_path)
    assert torch.equal(logits(copy), logits(original, leave_out=(1,)))
    assert not torch.equal(logits(copy), logits(original))
    check_same_tokenizer(original, copy)


def test_a_number_keeps_the_outer_layers(original: Path, tmp_path: Path) -> None:
    """The middle goes first: of four layers three are 0, 1 and 3."""
    copy = drop_layers(original, 3, tmp_path)
    assert torch.equal(logits(copy), logits(original, leave_out=(2,)))


@pytest.mark.parametrize("keep", [[0, 4], [0, 0], []])
def test_layers_that_are_not_there_are_refused(
    original: Path, tmp_path: Path, keep: list[int]
) -> None:
    """A copy is never made of layers the original has not."""
    with pytest.raises(ValueError, match="cannot keep"):
        drop_layers(original, keep, tmp_path)
