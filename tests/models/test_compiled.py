"""Compiled kernels: what torch says, to the same bits whatever is computed beside it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cluster.models import compiled
from cluster.models.attention import Segment, plan_attention
from cluster.models.compiled import CompiledLinear, CompiledPlan, CompiledPointwise
from cluster.models.kv_cache import KVCache
from cluster.models.linear import int8_linear, rowwise_int8
from cluster.models.load import load_decoder
from cluster.models.spec import ModelSpec
from tests.checkpoints import make_checkpoint
from tests.models.runs import in_chunks, make_cache, prefill, random_ids

POSITIONS = 150


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many threads in torch, and hence in the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def attention_spec(*, head_dim: int, window: int | None) -> ModelSpec:
    """One layer with three query heads to a key head."""
    return ModelSpec(
        architecture="llama",
        vocab_size=10,
        hidden_size=6 * head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_linear_factor=1.0,
        rope_scaling=None,
        sliding_windows=(window,),
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        tied_head=False,
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (300, 37), (96, 64), (960, 576)], ids=str)
def test_a_linear_of_any_shape_and_number_of_rows(shape: tuple[int, int]) -> None:
    """One row has the bits it has among thirty, and all are right."""
    weight, bias = normal(*shape), normal(shape[0], seed=1)
    rows, residual = normal(30, shape[1], seed=2), normal(30, shape[0], seed=3)
    linear = CompiledLinear(weight, bias)
    whole = linear.add_to(residual, rows)
    exact = rows.double() @ weight.double().T + bias + residual
    torch.testing.assert_close(whole.double(), exact, atol=2e-4, rtol=1e-5)
    for size in range(1, 30):
        assert torch.equal(linear.add_to(residual[:size], rows[:size]), whole[:size])
    assert torch.equal(linear(rows[::2]), linear(rows)[::2])


def test_threads_change_no_bit() -> None:
    """What one thread computes two compute."""
    linears = (CompiledLinear(normal(960, 576), None), int8_linear(normal(960, 576), None))
    rows, results = normal(20, 576, seed=1), []
    before = torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        results.append([linear(rows) for linear in linears])
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_int8_rounds_weights_alone() -> None:
    """The product is that of the levels times their scales, with inputs as they are."""
    weight, rows = normal(50, 40), normal(7, 40, seed=1)
    levels, scales = rowwise_int8(weight)
    expected = rows.double() @ (levels * scales[:, None]).double().T
    torch.testing.assert_close(
        int8_linear(weight, None)(rows).double(), expected, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("size", [1, 16, 577])
def test_what_lies_between(size: int) -> None:
    """Norms and activations, small and large numbers, and nothing but zeros."""
    pointwise = CompiledPointwise()
    rows, weight = (
        normal(5, size) * torch.tensor([[1e-6], [1.0], [40.0], [3e3], [0.0]]),
        normal(size),
    )
    normed = functional.rms_norm(rows, (size,), eps=1e-5)
    torch.testing.assert_close(pointwise.norm(rows, None, 1e-5), normed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        pointwise.norm(rows, weight, 1e-5), normed * weight, atol=1e-5, rtol=1e-5
    )
    gate_up = torch.cat([rows, normal(5, size, seed=1)], dim=1)
    expected = functional.silu(rows) * gate_up[:, size:]
    torch.testing.assert_close(pointwise.swiglu(gate_up), expected, atol=1e-5, rtol=1e-5)


def attended(spec: ModelSpec, segments: Sequence[Segment], *, block_size: int) -> Tensor:
    """Attention over a cache that has the same at every position, whatever its blocks."""
    cache = KVCache(
        spec, num_blocks=2 * POSITIONS // block_size + 2, block_size=block_size,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    width = spec.num_heads + 2 * spec.num_kv_heads
    past = normal(POSITIONS, 2 * spec.num_kv_heads, spec.head_dim, seed=1)
    heads = normal(POSITIONS, width, spec.head_dim, seed=2)
    for segment in segments:
        slots = cache.slots(segment.block_table, 0, POSITIONS)
        cache.layers[0, slots] = past
    plan = plan_attention(spec, segments, cache, paired=False)
    assert isinstance(plan, CompiledPlan)
    rows = torch.cat([heads[each.start : each.start + each.num_rows] for each in segments])
    factors = torch.ones(len(rows), width, spec.head_dim // 2, dtype=torch.complex64)
    return plan.attend(rows, factors, 0)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 128, 272])
def test_attention_is_torchs(head_dim: int, window: int | None) -> None:
    """Any size of head, over any blocks, alone or beside others, with or without a window."""
    spec = attention_spec(head_dim=head_dim, window=window)
    heads = normal(POSITIONS, 10, head_dim, seed=2)
    past = normal(POSITIONS, 4, head_dim, seed=1)
    start, num_rows = 100, 9
    keys_values = torch.cat([past[:start], heads[start : start + num_rows, 6:]])
    queries = heads[start : start + num_rows, :6].transpose(0, 1)
    keys, values = (
        each.transpose(0, 1).repeat_interleave(3, 0) for each in keys_values.split(2, 1)
    )
    ahead = torch.arange(start + num_rows) - torch.arange(start, start + num_rows)[:, None]
    seen = ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)
    expected = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    expected = expected.transpose(0, 1).reshape(num_rows, -1)

    whole = attended(spec, [Segment((0,), start, num_rows)], block_size=POSITIONS)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)
    table = tuple(range(10, 0, -1))
    scattered = attended(spec, [Segment(table, start, num_rows)], block_size=16)
    assert torch.equal(scattered, whole)
    lone = Segment((0,), start + num_rows - 1, 1)
    beside = attended(spec, [Segment((1,), 3, 40), lone], block_size=POSITIONS)
    assert not torch.equal(beside[-1], whole[-1])  # the rows before it are the cache's own there
    assert torch.equal(beside[-1], attended(spec, [lone], block_size=POSITIONS)[0])


def test_candidates_are_all_that_could_be_the_largest() -> None:
    """No more and no fewer than a look at every number finds; too many are none."""
    estimates, bounds = normal(3, 1000), normal(1000, seed=1).abs()
    lengths = torch.tensor([0.1, 0.5, 0.0])
    errors = lengths[:, None] * bounds
    least = (estimates - errors).amax(dim=1, keepdim=True)
    expected = (estimates + errors >= least).nonzero(as_tuple=True)
    found = compiled.candidates(estimates, bounds, lengths, most=2000)
    assert found is not None
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert compiled.candidates(estimates, bounds, lengths, most=len(expected[0]) - 1) is None
    nothing = compiled.candidates(estimates * torch.nan, bounds, lengths, most=10)
    assert nothing is not None
    assert len(nothing[0]) == 0


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_all_layers_at_once_have_the_bits_of_one_by_one(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases and windows included; who asks for what comes between gets the layers one by one."""
    more = {"sliding_window": 20} if family == "mistral" else {}
    folder = make_checkpoint(tmp_path, family=family, hidden_size=48, **more)
    decoder = load_decoder(folder, dtype=dtype)
    assert decoder._at_once is not None
    token_ids = random_ids(decoder, 90)
    whole = in_chunks(decoder, token_ids, [40, 1, 9] + [1] * 40, make_cache(decoder))
    monkeypatch.setattr(decoder, "_at_once", None)
    assert torch.equal(whole, prefill(decoder, token_ids))
    without = decoder.without(mlp=[0])
    assert not torch.equal(prefill(without, token_ids), whole)


def test_where_no_thread_pool_is_safe_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels every kind of linear and of attention is still there."""
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    assert not compiled.serves(torch.device("cpu"), torch.float32)
    assert not isinstance(int8_linear(normal(8, 8), None), CompiledLinear)
