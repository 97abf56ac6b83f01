"""Drafts from text: against a naive search, their ends, their cost, and who sees whose text."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafters import ngram, tenants
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.silent import NoDrafter
from cluster.drafters.table import build_table
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, SamplingSpec
from tests.drafters import naive


def drafted(
    drafter: NgramDrafter | NoDrafter,
    token_ids: Sequence[int],
    num_wanted: int,
    *,
    seq_id: int = 0,
    num_prompt_tokens: int = 0,
    price: float = 0.0,
    cache_salt: str = "",
) -> Draft | None:
    query = DraftQuery(
        seq_id=seq_id,
        token_ids=token_ids,
        num_wanted=num_wanted,
        sampling=SamplingSpec(seed=0, temperature=0.0, num_prompt_tokens=num_prompt_tokens),
        price=price,
        cache_salt=cache_salt,
    )
    return asyncio.run(drafter.propose([query])).get(seq_id)


def propose(
    drafter: NgramDrafter | NoDrafter, token_ids: Sequence[int], num_wanted: int, *, seq_id: int = 0
) -> tuple[int, ...] | None:
    draft = drafted(drafter, token_ids, num_wanted, seq_id=seq_id)
    return None if draft is None else draft.token_ids


@given(
    chunks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    num_wanted=st.integers(1, 6),
)
def test_drafts_equal_a_naive_search(chunks: list[list[int]], num_wanted: int) -> None:
    """However a context grew, the draft is what a search of the whole of it finds."""
    drafter = NgramDrafter(least_survival=0.0)
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk
        expected = naive.draft(token_ids, num_wanted, ngram.HALF_LIFE)
        assert (propose(drafter, token_ids, num_wanted) or ()) == expected


def test_longest_match_wins_over_a_later_shorter_one() -> None:
    """Two tokens of agreement say more than one, however recent the one is."""
    assert propose(NgramDrafter(), [1, 2, 9, 5, 2, 8, 1, 2], 1) == (9,)


def test_most_recent_of_equal_matches_wins() -> None:
    """Text repeats its neighbourhood."""
    assert propose(NgramDrafter(), [2, 8, 2, 9, 2], 1) == (9,)


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

    drafter = NgramDrafter()
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
    assert not drafter._texts


def test_a_draft_says_how_sure_it_is_of_each_token() -> None:
    """Margins grow with the match and with the share of what followed, and carry the name."""
    short = drafted(NgramDrafter(), [1, 2, 9, 2], 1)
    longer = drafted(NgramDrafter(), [1, 2, 9, 1, 2], 1)
    seen_twice = drafted(NgramDrafter(), [1, 2, 9, 3, 2, 9, 2], 1)
    doubtful = drafted(NgramDrafter(), [1, 2, 9, 3, 2, 9, 4, 2, 8, 2], 1)
    assert short is not None
    assert longer is not None
    assert seen_twice is not None
    assert doubtful is not None
    assert (short.token_ids, doubtful.token_ids, doubtful.drafter) == ((9,), (9,), "ngram")
    [margin] = short.margins
    assert 0 < margin < longer.margins[0]
    assert margin < seen_twice.margins[0]
    assert doubtful.margins[0] < seen_twice.margins[0]


def test_a_draft_ends_where_it_is_not_likely_to_be_reached() -> None:
    """A copy grows surer the longer its match, so a price cuts the shortest match first."""
    token_ids = [1, 2, 3, 4, 5, 6, 1]
    assert drafted(NgramDrafter(), token_ids, 4, price=0.3) is not None
    assert drafted(NgramDrafter(), token_ids, 4, price=0.32) is None
    repeated = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5]
    lengths = [
        len(draft.token_ids) if (draft := drafted(NgramDrafter(), repeated, 8, price=price)) else 0
        for price in (0.0, 0.4, 0.6, 0.7, 0.9)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8
    assert 0 < lengths[2] < 8


def test_a_long_prompt_is_taken_in_over_several_calls() -> None:
    """No call reads more than its bound; short contexts do not wait for long ones."""
    drafter = NgramDrafter()
    long = [*range(5000), 7, 8]
    short = [1, 2, 3, 1, 2]
    queries = [
        DraftQuery(seq_id=seq_id, token_ids=token_ids, num_wanted=2, sampling=SamplingSpec(seed=0))
        for seq_id, token_ids in ((1, long), (2, short))
    ]
    answers = [asyncio.run(drafter.propose(queries)) for _ in range(3)]
    assert [sorted(answer) for answer in answers] == [[2], [2], [1, 2]]
    assert answers[2][1].token_ids == (9, 10)


def test_memory_of_one_sequence_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full index gives way to one of the last quarter, which then finds its matches."""
    monkeypatch.setattr(ngram, "MAX_INDEXED_TOKENS", 64)
    drafter = NgramDrafter()
    token_ids: list[int] = []
    for token_id in range(1000):
        token_ids.append(token_id)
        propose(drafter, token_ids, 2)
        assert drafter._texts[0].automaton.num_tokens <= 64
    token_ids += [995, 996]
    assert propose(drafter, token_ids, 2) == (997, 998)


def answered(
    drafter: NgramDrafter, answer: Sequence[int], *, cache_salt: str, seq_id: int = 1
) -> None:
    """A request of prompt 90 91 92 93 comes, is answered and ends."""
    for length in (0, len(answer)):
        text = [90, 91, 92, 93, *answer[:length]]
        drafted(drafter, text, 1, seq_id=seq_id, num_prompt_tokens=4, cache_salt=cache_salt)
    drafter.release([seq_id])


def test_a_tenant_is_drafted_what_it_was_answered_lately() -> None:
    """With memory, an answer's n-grams serve the same salt's next requests."""
    drafter = NgramDrafter(tenant_memory_tokens=1000)
    answered(drafter, [5, 6, 7, 8], cache_salt="a")
    draft = drafted(drafter, [1, 5, 6], 2, seq_id=2, cache_salt="a")
    assert draft is not None
    assert draft.token_ids == (7, 8)
    begins = drafted(drafter, [91, 92, 93], 1, seq_id=3, cache_salt="a")
    assert begins is not None
    assert begins.token_ids == (5,)


@given(
    salts=st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=6),
    asking=st.sampled_from(["", "a", "b"]),
)
def test_nothing_crosses_salts(salts: list[str], asking: str) -> None:
    """Whatever others were answered, a draft holds only what the salt's own requests said."""
    drafter = NgramDrafter(tenant_memory_tokens=1000)
    token_of = {"": 10, "a": 20, "b": 30}
    for number, salt in enumerate(salts):
        answered(drafter, [5, 6, token_of[salt]], cache_salt=salt, seq_id=number)
    draft = drafted(drafter, [1, 5, 6], 1, seq_id=100, cache_salt=asking)
    if asking in salts:
        assert draft is not None
        assert draft.token_ids == (token_of[asking],)
    else:
        assert draft is None


def test_no_draft_goes_on_from_one_answer_into_the_next() -> None:
    """Where an answer ended there is nothing to propose."""
    drafter = NgramDrafter(tenant_memory_tokens=1000)
    answered(drafter, [5, 6], cache_salt="a")
    answered(drafter, [7, 8], cache_salt="a")
    assert drafted(drafter, [1, 5, 6], 2, seq_id=2, cache_salt="a") is None


def test_tenant_memory_is_bounded() -> None:
    """Neither long answers nor many of them nor many tenants take more than was configured."""
    drafter = NgramDrafter(tenant_memory_tokens=100)
    for number in range(200):
        answer = range(1000 * number, 1000 * number + number)
        answered(drafter, list(answer), cache_salt=f"{number % 100}", seq_id=number)
    memory = drafter._memory
    assert memory is not None
    assert len(memory._texts) == tenants.MAX_TENANTS
    assert max(text.num_tokens for text in memory._texts.values()) <= 100


def test_without_memory_an_ended_sequence_leaves_nothing() -> None:
    """The default keeps no answer at all."""
    drafter = NgramDrafter()
    answered(drafter, [5, 6, 7], cache_salt="a")
    assert drafter._memory is None
    assert not drafter._texts
    assert drafted(drafter, [1, 5, 6], 2, seq_id=2, cache_salt="a") is None


def test_a_table_serves_where_the_own_text_has_nothing() -> None:
    """A match of the own text goes before the same match of the table."""
    drafter = NgramDrafter(table=build_table([[1, 2, 3, 4, 5]], vocabulary=""))
    assert propose(drafter, [9, 1, 2], 3, seq_id=1) == (3, 4, 5)
    assert propose(drafter, [1, 2, 8, 1, 2], 1, seq_id=2) == (8,)


def test_no_drafter_never_proposes() -> None:
    """Plain decoding is a drafter without drafts."""
    drafter = NoDrafter()
    assert propose(drafter, [7, 7, 7], 4) is None
    drafter.release([0])
    assert drafter.context_limit is None
