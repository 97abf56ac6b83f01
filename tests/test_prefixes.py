"""Digests of prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.prefixes import DIGEST_TOKENS, MOST_DIGESTS, Chain, prefix_digests

tokens = st.lists(st.integers(0, 3), max_size=5 * DIGEST_TOKENS)


@given(tokens, st.lists(st.integers(1, 70), max_size=10))
def test_how_tokens_come_in_makes_no_difference(token_ids: list[int], cuts: list[int]) -> None:
    """A prompt at once and the blocks of a cache, one by one, have the same digests."""
    chain = Chain("salt")
    pieces, start = [], 0
    for cut in [*cuts, len(token_ids)]:
        pieces += chain.extend(token_ids[start : start + cut])
        start += cut
    assert tuple(pieces) == prefix_digests(token_ids, salt="salt")


@given(tokens, tokens)
def test_digests_agree_as_far_as_the_tokens_do(left: list[int], right: list[int]) -> None:
    """The first digest that differs is the first whose tokens do."""
    a, b = prefix_digests(left), prefix_digests(right)
    for count, (one, other) in enumerate(zip(a, b, strict=False), start=1):
        stop = count * DIGEST_TOKENS
        assert (one == other) == (left[:stop] == right[:stop])


def test_a_salt_keeps_prompts_apart() -> None:
    """What is not shared between tenants is not taken to be."""
    prompt = range(DIGEST_TOKENS)
    assert set(prefix_digests(prompt, salt="a")).isdisjoint(prefix_digests(prompt, salt="b"))


def test_a_long_prompt_has_no_more_than_the_most() -> None:
    """What a request costs to route is bounded."""
    assert len(prefix_digests([1] * (MOST_DIGESTS + 9) * DIGEST_TOKENS)) == MOST_DIGESTS
    assert prefix_digests([1] * (DIGEST_TOKENS - 1)) == ()
