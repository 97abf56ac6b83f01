"""The n-gram table: against plain counting, and as a file."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafters.table import CONTEXT_LENGTHS, Entry, build_table, load_table
from cluster.errors import ConfigurationError

corpora = st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=5)
LARGEST_ID = 2**21 - 1


def counted(texts: list[list[int]]) -> dict[tuple[int, ...], Counter[int]]:
    """What followed each context, by looking at each place."""
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for place in range(len(text)):
            for length in CONTEXT_LENGTHS:
                if length <= place:
                    followers[tuple(text[place - length : place])][text[place]] += 1
    return followers


@given(texts=corpora, min_count=st.integers(1, 3))
def test_entries_are_those_of_plain_counting(texts: list[list[int]], min_count: int) -> None:
    """Every context that was followed has its most frequent follower; the smaller id of equals."""
    table = build_table(texts, vocabulary="", min_count=min_count)
    expected = {}
    for context, followers in counted(texts).items():
        token_id, count = min(followers.items(), key=lambda item: (-item[1], item[0]))
        if count >= min_count:
            expected[context] = Entry(len(context), token_id, count, followers.total())
    assert len(table) == len(expected)
    for context in counted(texts):
        found = [entry for entry in table.entries(context) if entry.length == len(context)]
        assert found == ([expected[context]] if context in expected else [])


@given(texts=corpora)
def test_the_longest_context_comes_first(texts: list[list[int]]) -> None:
    """All entries of the last tokens, by falling length; unknown contexts have none."""
    table = build_table(texts, vocabulary="")
    known = counted(texts)
    for text in texts:
        lengths = [length for length in CONTEXT_LENGTHS if tuple(text[-length:]) in known]
        lengths = [length for length in lengths if length <= len(text)]
        assert [entry.length for entry in table.entries(text)] == lengths
    assert table.entries([9, 9, 9]) == []


def test_contexts_of_the_largest_ids_are_told_apart() -> None:
    """Packing loses nothing: neighbours in one place are no neighbours in another."""
    texts = [[LARGEST_ID, LARGEST_ID - 1, 0, 1], [LARGEST_ID - 1, LARGEST_ID, 0, 2]]
    table = build_table(texts, vocabulary="")
    assert table.entries(texts[0][:3])[0] == Entry(3, 1, 1, 1)
    assert table.entries(texts[1][:3])[0] == Entry(3, 2, 1, 1)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    """What was saved is loaded, under exactly the name that was given."""
    texts = [[1, 2, 3, 1, 2, 4], [1, 2, 3]]
    table = build_table(texts, vocabulary="abc")
    table.save(tmp_path / "answers.table")
    loaded = load_table(tmp_path / "answers.table")
    assert (loaded.vocabulary, len(loaded)) == ("abc", len(table))
    assert all(loaded.entries(text[:2]) == table.entries(text[:2]) for text in texts)
    assert loaded.entries([1, 2])[0] == Entry(2, 3, 2, 3)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    """No file, another file, a part of a table, and one whose parts do not fit, each by name."""
    table = build_table([[1, 2, 3, 4]], vocabulary="")
    table.save(tmp_path / "good")
    with np.load(tmp_path / "good") as file:
        arrays = dict(file)
    (tmp_path / "text").write_text("no table")
    np.savez(tmp_path / "part.npz", keys_1=arrays["keys_1"])
    np.savez(tmp_path / "short.npz", **arrays | {"counts_2": arrays["counts_2"][1:]})
    np.savez(tmp_path / "unsorted.npz", **arrays | {"keys_1": arrays["keys_1"][::-1]})
    for name in ("missing", "text", "part.npz", "short.npz", "unsorted.npz"):
        with pytest.raises(ConfigurationError, match=name):
            load_table(tmp_path / name)
