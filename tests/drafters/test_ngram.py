"""Prompt lookup against a naive reference, its cost and its memory."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.silent import NoDrafter
from cluster.interfaces import DraftQuery
from cluster.messages import SamplingSpec

GREEDY = SamplingSpec(seed=0, temperature=0.0)


def propose(
    drafter: NgramDrafter | NoDrafter,
    token_ids: Sequence[int],
    num_wanted: int,
    *,
    seq_id: int = 0,
) -> tuple[int, ...] | None:
    query = DraftQuery(seq_id=seq_id, token_ids=token_ids, num_wanted=num_wanted, sampling=GREEDY)
    draft = asyncio.run(drafter.propose([query])).get(seq_id)
    return None if draft is None else draft.token_ids


def naive_lookup(
    token_ids: list[int], num_wanted: int, *, max_match: int, min_match: int
) -> tuple[int, ...] | None:
    """What the drafter promises, by searching the whole context from its end."""
    for length in range(max_match, min_match - 1, -1):
        suffix = token_ids[-length:]
        for follower in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[follower - length : follower] == suffix:
                text = list(token_ids)
                for step in range(num_wanted):
                    text.append(text[follower + step])
                return tuple(text[len(token_ids) :])
    return None


@given(
    chunks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    num_wanted=st.integers(1, 6),
    matches=st.sampled_from([(1, 1), (3, 1), (3, 2), (4, 3)]),
)
def test_drafts_equal_a_naive_search(
    chunks: list[list[int]], num_wanted: int, matches: tuple[int, int]
) -> None:
    """However a context grew, the draft is what a search of the whole of it finds."""
    max_match, min_match = matches
    drafter = NgramDrafter(max_match, min_match)
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk
        expected = naive_lookup(token_ids, num_wanted, max_match=max_match, min_match=min_match)
        assert propose(drafter, token_ids, num_wanted) == expected


def test_longest_match_wins_over_a_later_shorter_one() -> None:
    """Two tokens of agreement say more than one, however recent the one is."""
    assert propose(NgramDrafter(2, 1), [1, 2, 9, 5, 2, 8, 1, 2], 1) == (9,)


def test_most_recent_of_equal_matches_wins() -> None:
    """Text repeats its neighbourhood."""
    assert propose(NgramDrafter(1, 1), [2, 8, 2, 9, 2], 1) == (9,)


def test_x01_a_repeated_word_drafts_as_many_as_wanted() -> None:
    """A copy that reaches the end of the context goes on over what it has copied."""
    assert propose(NgramDrafter(), [7, 7], 5) == (7, 7, 7, 7, 7)
    assert propose(NgramDrafter(), [1, 2, 3, 1, 2], 6) == (3, 1, 2, 3, 1, 2)


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3]])
def test_nothing_seen_before_nothing_drafted(token_ids: list[int]) -> None:
    """No match is no draft, not an empty or a made-up one."""
    assert propose(NgramDrafter(), token_ids, 4) is None


def test_x53_a_match_after_a_hundred_steps_without_one() -> None:
    """Steps without a match leave nothing behind that could spoil the first one with."""
    drafter = NgramDrafter()
    token_ids = [1000, 1001, 1002]
    for step in range(100):
        token_ids.append(step)
        assert propose(drafter, token_ids, 4) is None
    token_ids += [1000, 1001]
    assert propose(drafter, token_ids, 4) == (1002, 0, 1, 2)


def test_nothing_wanted_nothing_drafted() -> None:
    """A query for no tokens gets none."""
    assert propose(NgramDrafter(), [7, 7, 7], 0) is None


def test_a_step_reads_only_the_new_tokens() -> None:
    """The cost of a step does not grow with the context: old tokens are not read again."""

    class Counting(list[int]):
        read = 0

        def __getitem__(self, key: object) -> object:
            count = len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
            Counting.read += count
            return super().__getitem__(key)

    drafter = NgramDrafter(3, 1)
    token_ids = Counting(range(2000))
    propose(drafter, token_ids, 4)
    Counting.read = 0
    for token in range(10):
        token_ids.append(token)
        propose(drafter, token_ids, 4)
    assert Counting.read < 10 * 50


def test_a_context_that_shrank_or_changed_is_read_anew() -> None:
    """A known id with another context gets drafts of that context only."""
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 4, 5, 6], 2)
    assert propose(drafter, [1, 9, 1], 2) == (9, 1)
    assert propose(drafter, [5, 6, 8, 5], 2) == (6, 8)


def test_sequences_do_not_see_each_other() -> None:
    """What one request said never surfaces in another."""
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 1], 2, seq_id=1)
    assert propose(drafter, [2, 5, 1], 2, seq_id=2) is None


def test_release_frees_the_index() -> None:
    """Nothing of an ended sequence stays; unknown ids are no error."""
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 1], 2, seq_id=1)
    propose(drafter, [1, 2, 1], 2, seq_id=2)
    drafter.release([1, 2, 3])
    assert not drafter._indexes


@pytest.mark.parametrize(("max_match", "min_match"), [(0, 0), (2, 3), (3, 0)])
def test_bounds_that_make_no_sense_are_refused(max_match: int, min_match: int) -> None:
    """A drafter that could never match is an error at start."""
    with pytest.raises(ValueError, match="does not hold"):
        NgramDrafter(max_match, min_match)


def test_no_drafter_never_proposes() -> None:
    """Plain decoding is a drafter without drafts."""
    drafter = NoDrafter()
    assert propose(drafter, [7, 7, 7], 4) is None
    drafter.release([0])
    assert drafter.context_limit is None
