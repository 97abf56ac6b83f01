"""The decoder computes what transformers computes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.models.decoder import Segment
from cluster.models.load import load_decoder, load_spec
from tests.checkpoints import make_checkpoint
from tests.models.runs import (
    in_chunks,
    in_company,
    make_cache,
    prefill,
    random_ids,
    reference_logits,
)

TOLERANCE = 1e-3
NUM_TOKENS = 150
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS: dict[str, dict[str, object]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True},
    "llama-rope-llama3": {"rope_parameters": LLAMA3},
    "llama-rope-linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    },
    "llama-one-kv-head": {"num_kv_heads": 1},
    "llama-every-kv-head": {"num_kv_heads": 4},
    "llama-wide-heads": {"head_dim": 128},
    "mistral": {},
    "mistral-window": {"sliding_window": 37},
    "qwen2": {},
    "qwen2-window": {
        "use_sliding_window": True,
        "sliding_window": 50,
        "max_window_layers": 1,
        "layer_types": None,
    },
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3-biases": {"attention_bias": True, "num_kv_heads": 1},
}


@pytest.fixture(params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One checkpoint of the table."""
    name: str = request.param
    return make_checkpoint(tmp_path, family=name.split("-", maxsplit=1)[0], **CHECKPOINTS[name])


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_logits_are_those_of_transformers(
    folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family, with every option it may have: at once, one by one, and after truncates."""
    if kernels == "torch":
        monkeypatch.setattr("cluster.models.compiled.is_available", lambda: False)
    decoder = load_decoder(folder, dtype="float32")
    token_ids = random_ids(decoder, NUM_TOKENS)
    expected = reference_logits(folder, token_ids)
    cache = make_cache(decoder, num_blocks=12, block_size=16)
    for computed in (
        prefill(decoder, token_ids),
        in_chunks(decoder, token_ids, [100] + [1] * 50, make_cache(decoder)),
        in_company(decoder, [token_ids], cache, seed=1, max_rows=17)[0],
    ):
        torch.testing.assert_close(computed, expected, atol=TOLERANCE, rtol=0)


def test_a_window_changes_the_logits(tmp_path: Path) -> None:
    """The windowed case of the table is no idle one: without its window the logits differ."""
    windowed = load_decoder(
        make_checkpoint(tmp_path / "a", family="mistral", sliding_window=37), dtype="float32"
    )
    unlimited = load_decoder(make_checkpoint(tmp_path / "b", family="mistral"), dtype="float32")
    token_ids = random_ids(windowed, NUM_TOKENS)
    difference = (prefill(windowed, token_ids) - prefill(unlimited, token_ids)).abs().amax(dim=1)
    assert torch.all(difference[:37] == 0)
    assert difference[37] > TOLERANCE


def test_int8_stays_close_to_float32(tmp_path: Path) -> None:
    """int8 is the same model, coarser: its logits correlate with float32's almost fully."""
    folder = make_checkpoint(tmp_path, num_layers=4)
    exact, coarse = (load_decoder(folder, dtype=dtype) for dtype in ("float32", "int8"))
    token_ids = random_ids(exact, NUM_TOKENS)
    logits = torch.stack([prefill(d, token_ids).flatten() for d in (exact, coarse)])
    assert torch.corrcoef(logits)[0, 1] > 0.99


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened(tmp_path: Path, stored: torch.dtype) -> None:
    """A checkpoint stored in half precision computes in the dtype that was asked for."""
    folder = _saved_again(make_checkpoint(tmp_path / "float32"), tmp_path / "half", dtype=stored)
    decoder = load_decoder(folder, dtype="float32")
    token_ids = random_ids(decoder, 40)
    logits = prefill(decoder, token_ids)
    assert logits.dtype == torch.float32
    expected = reference_logits(folder, token_ids)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_computes_on_a_cpu_too(tmp_path: Path) -> None:
    """Half precision is not the fast format here, but it is served where it is asked for."""
    folder = make_checkpoint(tmp_path)
    decoder = load_decoder(folder, dtype="bfloat16")
    token_ids = random_ids(decoder, 40)
    logits = torch.stack([prefill(decoder, token_ids), reference_logits(folder, token_ids)])
    assert torch.corrcoef(logits.flatten(1))[0, 1] > 0.99


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    """Weights in several files load as from one."""
    whole = make_checkpoint(tmp_path / "whole", num_layers=3)
    sharded = _saved_again(whole, tmp_path / "sharded", max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, many = (load_decoder(folder, dtype="float32") for folder in (whole, sharded))
    token_ids = random_ids(one, 20)
    assert torch.equal(prefill(one, token_ids), prefill(many, token_ids))


def test_no_row_reads_another_sequences_memory(tmp_path: Path) -> None:
    """Not even as a masked key: a poisoned neighbour leaves every bit as it was."""
    decoder = load_decoder(make_checkpoint(tmp_path), dtype="float32")
    token_ids = random_ids(decoder, 100)
    expected = prefill(decoder, token_ids)
    for block_size in (16, 40, 100, 128):
        num_blocks = -(-100 // block_size)
        cache = make_cache(decoder, num_blocks=2 * num_blocks, block_size=block_size)
        cache.layers.fill_(torch.nan)
        table = tuple(range(0, 2 * num_blocks, 2))
        for block in table:
            first = block * cache.block_stride
            cache.layers[:, first : first + cache.block_stride] = 0
        hidden = [
            decoder.forward(token_ids[i : i + 10], [Segment(table, i, 10)], cache)
            for i in range(0, 100, 10)
        ]
        assert torch.equal(decoder.logits(torch.cat(hidden)), expected)


def test_a_spec_says_what_the_checkpoint_is(tmp_path: Path) -> None:
    """What the engine plans with is read from config.json alone."""
    folder = make_checkpoint(tmp_path, family="qwen2", vocab_size=300, num_layers=3)
    (folder / "model.safetensors").unlink()
    spec = load_spec(folder)
    assert (spec.architecture, spec.vocab_size, spec.num_layers) == ("qwen2", 300, 3)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert spec.max_position_embeddings == 2048


def _saved_again(
    folder: Path, goal: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB"
) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(goal, max_shard_size=max_shard_size)
    return goal
