"""The bits of a position depend on its own sequence alone: every comparison here is exact."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.models.decoder import Decoder
from cluster.models.linear import LINEARS, PlainLinear
from cluster.models.load import load_decoder
from tests.checkpoints import make_checkpoint
from tests.models.runs import in_chunks, in_company, make_cache, prefill, random_ids

# Widths at which oneDNN and MKL change their ways, as in the real model, and heads of 64 and 128.
SHAPES: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 192, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 1536},
    "qwen2": {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2},
    "qwen3": {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128},
    "mistral": {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 2, "sliding_window": 100},
}
NUM_TOKENS = 200
LENGTHS = (200, 70, 130, 64, 33)


@pytest.fixture(
    scope="module",
    params=[
        (family, dtype, kernels)
        for family in SHAPES
        for dtype in ("float32", "int8")
        for kernels in ("compiled", "torch")
    ],
    ids="-".join,
)
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Decoder]:
    """A decoder of each family in each exact dtype, by kernels and where there are none."""
    family, dtype, kernels = request.param
    folder = tmp_path_factory.mktemp(family)
    with pytest.MonkeyPatch.context() as patch:
        if kernels == "torch":
            patch.setattr("cluster.models.compiled.is_available", lambda: False)
        yield load_decoder(make_checkpoint(folder, family=family, **SHAPES[family]), dtype=dtype)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Leave the thread count as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("sizes", "block_size"),
    [([1], 1024), ([2], 64), ([3, 5, 7], 16), ([8], 48), ([17], 1024), ([100, 1, 63], 16)],
    ids=str,
)
def test_chunks_do_not_show(decoder: Decoder, sizes: list[int], block_size: int) -> None:
    """A prompt at once, in chunks and token by token gives the same bits, in any blocks."""
    token_ids = random_ids(decoder, NUM_TOKENS)
    cache = make_cache(decoder, num_blocks=-(-NUM_TOKENS // block_size), block_size=block_size)
    assert torch.equal(in_chunks(decoder, token_ids, sizes, cache), prefill(decoder, token_ids))


@pytest.mark.parametrize("block_size", [1024, 64, 16])
def test_company_does_not_show(decoder: Decoder, block_size: int) -> None:
    """Ragged rows of several sequences, with drafts rejected, give the bits each has alone."""
    sequences = [random_ids(decoder, length, seed=length) for length in LENGTHS]
    cache = make_cache(decoder, num_blocks=40, block_size=block_size)
    together = in_company(decoder, sequences, cache, seed=3, max_rows=17)
    for computed, token_ids in zip(together, sequences, strict=True):
        assert torch.equal(computed, prefill(decoder, token_ids))


def test_long_contexts_are_no_exception(decoder: Decoder) -> None:
    """Past a few hundred keys matrix products are summed in parts: the bits stay."""
    token_ids = random_ids(decoder, 600)
    cache = make_cache(decoder)
    assert torch.equal(
        in_chunks(decoder, token_ids, [370, 1, 17, 5, 3], cache), prefill(decoder, token_ids)
    )


@pytest.mark.usefixtures("restored_threads")
def test_threads_do_not_show(decoder: Decoder) -> None:
    """One thread and two give the same bits."""
    token_ids = random_ids(decoder, NUM_TOKENS)
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(in_chunks(decoder, token_ids, [100, 1, 8], make_cache(decoder)))
    assert torch.equal(*results)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    block_size=st.sampled_from([7, 16, 64, 100, 256]),
    max_rows=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_no_schedule_shows(
    decoder: Decoder, lengths: list[int], block_size: int, max_rows: int, seed: int
) -> None:
    """Whatever a scheduler does, each sequence has the bits it has alone."""
    sequences = [random_ids(decoder, length, seed=seed + i) for i, length in enumerate(lengths)]
    num_blocks = sum(-(-length // block_size) for length in lengths)
    cache = make_cache(decoder, num_blocks=num_blocks, block_size=block_size)
    together = in_company(decoder, sequences, cache, seed=seed, max_rows=max_rows)
    for computed, token_ids in zip(together, sequences, strict=True):
        assert torch.equal(computed, prefill(decoder, token_ids))


def test_a_scale_for_the_whole_batch_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests can fail: rounding a row by its neighbours' largest value is noticed."""

    class BatchScaled(PlainLinear):
        def __call__(self, rows: Tensor) -> Tensor:
            scale = rows.abs().max() / 127
            return super().__call__(torch.round(rows / scale) * scale)

    monkeypatch.setitem(LINEARS, ("cpu", "float32"), BatchScaled)
    decoder = load_decoder(make_checkpoint(tmp_path), dtype="float32")
    token_ids = random_ids(decoder, 24)
    alone = in_chunks(decoder, token_ids, [1], make_cache(decoder))
    assert not torch.equal(alone, prefill(decoder, token_ids))
