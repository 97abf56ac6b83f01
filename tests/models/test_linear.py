"""A row of a linear layer knows nothing of its neighbours."""

import pytest
import torch

from cluster.models.compiled import CompiledLinear
from cluster.models.linear import (
    LINEARS,
    MakeLinear,
    ReorderedLinear,
    RowwiseInt8Linear,
    int8_linear,
    library_linear,
    linear_for,
)

EXACT = ["float32", "int8"]
SHAPES = [(64, 96), (576, 960), (1536, 576)]


@pytest.mark.parametrize(
    "make_linear",
    [CompiledLinear, int8_linear, library_linear, ReorderedLinear, RowwiseInt8Linear],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_know_of_one_another(make_linear: MakeLinear, shape: tuple[int, int]) -> None:
    """A row among few, among many and next to huge ones has the same bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape[1], shape[0], generator=generator)
    rows = torch.randn(300, shape[0], generator=generator)
    rows[1::2] *= 1000
    linear = make_linear(weight, torch.randn(shape[1], generator=generator))
    whole = linear(rows)
    for size in (2, 3, 4, 5, 8, 9, 16, 17, 32, 64, 100):
        assert torch.equal(linear(rows[40 : 40 + size]), whole[40 : 40 + size])


@pytest.mark.parametrize("dtype", EXACT)
def test_products_are_right(dtype: str) -> None:
    """Bias and residual are added once; int8 is within two percent of a row's largest."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(96, 64, generator=generator), torch.randn(96, generator=generator)
    rows, residual = (
        torch.randn(5, 64, generator=generator),
        torch.randn(5, 96, generator=generator),
    )
    rows[3] = 0
    expected = rows @ weight.T + bias
    tolerance = 1e-5 if dtype == "float32" else 0.02 * expected.abs().max().item()
    linear = linear_for("cpu", dtype)(weight, bias)
    torch.testing.assert_close(linear(rows), expected, atol=tolerance, rtol=0)
    before = residual.clone()
    added = linear.add_to(residual, rows)
    torch.testing.assert_close(added, before + expected, atol=tolerance, rtol=0)
    assert torch.equal(residual, before)


def test_every_dtype_of_the_configuration_has_a_linear() -> None:
    """What the configuration offers on a CPU can be loaded."""
    assert {name for device, name in LINEARS if device == "cpu"} == {
        "float32",
        "int8",
        "bfloat16",
        "float16",
    }
