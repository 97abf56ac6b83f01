"""What each rank holds of a model: everything once, as evenly as it comes out."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cluster.errors import ConfigurationError
from cluster.models.shard import Shard
from cluster.models.spec import ModelSpec, load_spec
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Some model's."""
    return load_spec(make_checkpoint(tmp_path_factory.mktemp("model")))


def shards(spec: ModelSpec, num_ranks: int) -> list[Shard]:
    return [Shard.of(spec, rank, num_ranks) for rank in range(num_ranks)]


@given(
    kv_heads=st.integers(1, 6),
    group=st.integers(1, 6),
    num_ranks=st.integers(1, 8),
    inner=st.integers(8, 100),
    vocab_size=st.integers(8, 100),
)
def test_everything_is_dealt_out_once(
    spec: ModelSpec, kv_heads: int, group: int, num_ranks: int, inner: int, vocab_size: int
) -> None:
    """Heads, inner elements and token ids are cut into the ranks' parts, in order.

    Every query head's key head is at hand where it is, and a rank's query heads share out evenly.
    """
    assume(-(-num_ranks // kv_heads) <= group)
    whole = replace(
        spec,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocab_size,
    )
    parts = shards(whole, num_ranks)
    assert [head for part in parts for head in part.heads] == list(range(kv_heads * group))
    assert [element for part in parts for element in part.inner] == list(range(inner))
    assert [token for part in parts for token in part.token_ids] == list(range(vocab_size))
    for part in parts:
        assert {head // group for head in part.heads} == set(part.kv_heads)
        assert part.spec.num_heads % part.spec.num_kv_heads == 0
        assert part.spec.num_heads > 0
        assert len(part.token_ids) <= part.vocabulary_size == parts[0].vocabulary_size
    assert max(len(part.inner) for part in parts) - min(len(part.inner) for part in parts) <= 1


def test_one_rank_holds_everything(spec: ModelSpec) -> None:
    """A model that is not split is as it was."""
    shard = Shard.of(spec)
    assert shard.spec == spec
    assert shard.vocabulary_size == spec.vocab_size


def test_three_key_heads_on_two_ranks(spec: ModelSpec) -> None:
    """What does not come out evenly is one head more, not a refusal."""
    parts = shards(replace(spec, num_heads=9, num_kv_heads=3), 2)
    assert [len(part.heads) for part in parts] == [6, 3]
    assert [len(part.kv_heads) for part in parts] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "num_ranks", "numbers"),
    [
        ({"num_heads": 4, "num_kv_heads": 2}, 5, "5 ranks cannot split 4 attention heads on 2 key"),
        ({"num_heads": 8, "num_kv_heads": 1, "intermediate_size": 7}, 8, "intermediate_size 7"),
        ({"num_heads": 8, "num_kv_heads": 1, "vocab_size": 6}, 8, "vocab_size 6"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(
    spec: ModelSpec, changes: dict[str, int], num_ranks: int, numbers: str
) -> None:
    """The error names the option and both numbers, before anything is loaded."""
    with pytest.raises(ConfigurationError, match=f"tensor_parallel_size: .*{numbers}"):
        Shard.of(replace(spec, **changes), 0, num_ranks)
