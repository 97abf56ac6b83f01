"""Logprobs: of the target as it is, in one order, with bits that no neighbour changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.sampling.logprobs import token_log_probs, top_log_probs


@given(
    logits=st.lists(
        st.lists(st.floats(-8, 8, width=16), min_size=12, max_size=12), min_size=1, max_size=5
    ),
    count=st.integers(1, 14),
)
def test_x42_the_top_are_the_most_probable_in_one_order(
    logits: list[list[float]], count: int
) -> None:
    """Best first, equal ones by rising id, each with the logprob it has by itself."""
    rows = torch.tensor(logits)
    for values, row, top in zip(logits, rows, top_log_probs(rows, count), strict=True):
        expected = sorted(range(12), key=lambda token_id: (-values[token_id], token_id))[:count]
        assert [token_id for token_id, _ in top] == expected
        alone = token_log_probs(row.expand(len(top), -1), expected)
        assert [value for _, value in top] == alone


@pytest.mark.parametrize("vocab_size", [49152, 50257])
def test_x42_the_top_of_a_row_does_not_depend_on_its_neighbours_or_on_more(vocab_size: int) -> None:
    """Alone or among nine, 5 asked for or 20: the same ids, the same bits."""
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    together = top_log_probs(logits, 20)
    for row in (0, 4, 8):
        assert top_log_probs(logits[row : row + 1].clone(), 5) == [together[row][:5]]
