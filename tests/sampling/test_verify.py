"""The acceptance rule, alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sampling.verify import VerifyResult, verify


@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), bonus=st.integers(0, 3))
def test_what_is_emitted_is_a_prefix_of_the_targets_own_tokens(
    pairs: list[tuple[int, int]], bonus: int
) -> None:
    """Accepted drafts and the next token are the target's draws, up to the first difference."""
    drafted, drawn = [pair[0] for pair in pairs], [*(pair[1] for pair in pairs), bonus]
    result = verify(drafted, drawn)
    emitted = [*drafted[: result.num_accepted], result.next_token_id]
    assert emitted == drawn[: len(emitted)]
    if result.num_accepted < len(drafted):
        assert drafted[result.num_accepted] != drawn[result.num_accepted]


def test_a_match_after_a_difference_does_not_count() -> None:
    """Rows after a rejection were computed on the wrong prefix."""
    assert verify([1, 2, 3], [1, 9, 3, 4]) == VerifyResult(1, 9)


def test_without_drafts_the_targets_token_is_next() -> None:
    """No draft is not a mode: plain decoding is the same rule."""
    assert verify([], [5]) == VerifyResult(0, 5)


@pytest.mark.parametrize("drawn", [[], [1], [1, 2, 3]])
def test_a_missing_or_surplus_target_token_is_an_error(drawn: list[int]) -> None:
    """One more target token than drafts, or the caller has mixed up rows."""
    with pytest.raises(ValueError, match="1 drafts need"):
        verify([1], drawn)
