"""The suffix automaton against searches of the whole text."""

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafters.suffixes import Follower, Match, SuffixAutomaton
from tests.drafters.naive import (
    longest_known_suffix,
    longest_repeated_suffix,
    weights_of_followers,
)

HALF_LIFE = 5.0

texts = st.lists(st.integers(0, 3), max_size=40)
text_chunks = st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=8)


def automaton_of(text: Sequence[int], *, max_depth: int = 1000) -> SuffixAutomaton:
    automaton = SuffixAutomaton(half_life=HALF_LIFE, max_depth=max_depth)
    automaton.extend(text)
    return automaton


def check_follower(text: list[int], context: list[int], found: Follower | None) -> None:
    """`found` is the context's heaviest follower, with the right weights."""
    weights = weights_of_followers(text, context, HALF_LIFE)
    if found is None:
        assert not weights
        return
    assert weights[found.token_id] == pytest.approx(max(weights.values()))
    assert found.weight == pytest.approx(weights[found.token_id])
    assert found.others == pytest.approx(sum(weights.values()) - found.weight)


@given(chunks=text_chunks)
def test_longest_match_is_that_of_a_search(chunks: list[list[int]]) -> None:
    """However a text grew: the longest suffix that occurred before, of any length."""
    automaton = SuffixAutomaton(half_life=HALF_LIFE)
    text: list[int] = []
    for chunk in chunks:
        text += chunk
        automaton.extend(chunk)
        assert automaton.longest().length == len(longest_repeated_suffix(text))


@given(text=texts)
def test_followers_of_all_suffixes_are_those_of_a_search(text: list[int]) -> None:
    """From the longest match down, each context's heaviest follower and both weights are exact."""
    automaton = automaton_of(text)
    match = automaton.longest()
    while match.length:
        check_follower(text, text[len(text) - match.length :], automaton.follower(match))
        match = automaton.shorter(match)


@given(text=texts, read=st.lists(st.integers(0, 4), max_size=12))
def test_reading_keeps_the_longest_suffix_that_is_a_substring(
    text: list[int], read: list[int]
) -> None:
    """After any tokens the match is their longest suffix in the text, with its true followers."""
    automaton = automaton_of(text)
    match = Match(0, 0)
    for token_id in read:
        match = automaton.after(match, token_id)
    expected = longest_known_suffix(text, read)
    assert match.length == len(expected)
    if match.length:
        check_follower(text, expected, automaton.follower(match))


def test_the_later_of_equally_frequent_followers_wins() -> None:
    """Text repeats its neighbourhood."""
    automaton = automaton_of([2, 8, 2, 9, 2])
    found = automaton.follower(automaton.longest())
    assert found is not None
    assert found.token_id == 9


@pytest.mark.parametrize("text", [[7] * 20_000, [1, 2, 3] * 7000, list(range(20_000))])
def test_memory_is_linear_in_any_text(text: list[int]) -> None:
    """At most two states a token, and so many bytes, also where text runs in a circle."""
    tracemalloc.start()
    automaton = automaton_of(text, max_depth=12)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert automaton.num_states <= 2 * len(text)
    assert num_bytes < 1000 * len(text)


def test_a_text_that_runs_in_a_circle_goes_on_with_it() -> None:
    """The bound on contexts that a token is entered for takes nothing from the longest ones."""
    automaton = automaton_of([1, 2, 3] * 500, max_depth=12)
    match = automaton.longest()
    followers = []
    for _ in range(7):
        while (found := automaton.follower(match)) is None:
            match = automaton.shorter(match)
        followers.append(found.token_id)
        match = automaton.after(match, found.token_id)
    assert followers == [1, 2, 3, 1, 2, 3, 1]
