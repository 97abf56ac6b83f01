"""A model over several ranks: what one rank alone says, up to rounding, and exact in itself."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.models.rank_work import Seen, look_at_all, steps
from tests.models.ranks import on_ranks

# Key heads as many as ranks, fewer, more, and in a number that does not come out.
MODELS: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "tie_word_embeddings": True},
    "qwen2": {"num_heads": 4, "num_kv_heads": 1, "vocab_size": 511, "intermediate_size": 1537},
    "qwen3": {"num_heads": 4, "num_kv_heads": 4, "vocab_size": 509, "head_dim": 32},
}
CASES = [("llama", "float32"), ("llama", "int8"), ("qwen2", "float32"), ("qwen3", "float32")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A model for each case."""
    made = {
        family: make_checkpoint(tmp_path_factory.mktemp(family), family=family, **changes)
        for family, changes in MODELS.items()
    }
    return {(family, dtype): made[family] for family, dtype in CASES}


@pytest.fixture(scope="module")
def alone(folders: dict[tuple[str, str], Path]) -> list[Seen]:
    """What one rank says, by case."""
    before = torch.get_num_threads()
    seen = look_at_all(None, folders)
    torch.set_num_threads(before)
    return seen


@pytest.fixture(scope="module", params=[2, 3])
def on_each_rank(
    folders: dict[tuple[str, str], Path], request: pytest.FixtureRequest
) -> list[list[Seen]]:
    """What each of several ranks says, by rank and case."""
    return on_ranks(request.param, partial(look_at_all, folders=folders))


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(case) for case in CASES])
class TestSeveralRanks:
    """Against one rank, in each case."""

    def test_say_what_one_says(
        self, alone: list[Seen], on_each_rank: list[list[Seen]], case: int
    ) -> None:
        """Logits, whole on rank 0, are equal up to rounding: sums have another order."""
        one, first = alone[case].logits, on_each_rank[0][case].logits
        assert first.shape == one.shape
        if CASES[case][1] == "float32":
            assert float((first - one).abs().max()) < 1e-4
        else:
            assert float((first - one).std()) < 0.1 * float(one.std())

    def test_let_no_schedule_show(self, on_each_rank: list[list[Seen]], case: int) -> None:
        """Chunks, batches and ragged rows give the same bits on every rank."""
        for rank in on_each_rank:
            assert all(rank[case].schedules.values()), rank[case].schedules
            assert rank[case].self_check == ()

    def test_hold_a_part_each(
        self, alone: list[Seen], on_each_rank: list[list[Seen]], case: int
    ) -> None:
        """Of weights and of key heads, and together not much more than one rank holds."""
        num_ranks, one = len(on_each_rank), alone[case]
        held = [rank[case].num_elements / one.num_elements for rank in on_each_rank]
        assert max(held) < 1 / num_ranks + 0.12
        assert 1.0 <= sum(held) < 1.15  # key heads that several hold, and padding
        num_kv_heads = max(rank[case].num_kv_heads for rank in on_each_rank)
        assert num_kv_heads == -(-one.num_kv_heads // num_ranks)

    def test_answer_as_one(
        self, alone: list[Seen], on_each_rank: list[list[Seen]], case: int
    ) -> None:
        """Rank 0 draws, verifies, scores and fails what one rank does; the others say nothing."""
        for mine, theirs in zip(alone[case].answers, on_each_rank[0][case].answers, strict=True):
            assert mine is not None
            assert theirs is not None
            for one, other in zip(mine.sequences, theirs.sequences, strict=True):
                assert (one.seq_id, one.error) == (other.seq_id, other.error)
                if CASES[case][1] == "int8":  # rounded in another way: other tokens
                    continue
                assert one.scores == pytest.approx(other.scores, abs=1e-4)
                assert replace(one, scores=()) == replace(other, scores=())
        for rank in on_each_rank[1:]:
            assert rank[case].answers == [None] * len(steps())


def test_a_rank_that_is_gone_is_noticed_by_the_others(on_each_rank: list[list[object]]) -> None:
    """At the next exchange, long before any time-out, with the protocol's own error."""
    assert "rank 0 does not reach the others" in str(on_each_rank[0][-1])
