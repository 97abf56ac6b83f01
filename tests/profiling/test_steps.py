"""Timing steps on a tiny model: which shapes, on whose memory, and what comes out."""

from pathlib import Path

import pytest
import torch

from cluster.config import TargetConfig
from cluster.local import build_target_worker
from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.profiling.steps import (
    NUM_CORNERS,
    ProfiledShape,
    measure_points,
    profile_steps,
    profiled_shapes,
)
from cluster.worker import TargetWorker


@pytest.fixture
def worker(checkpoints: dict[str, Path]) -> TargetWorker:
    """A target for four sequences of 256 tokens in blocks of 16."""
    config = TargetConfig(
        model=str(checkpoints["target"]), max_model_len=256, max_num_seqs=4, block_size=16
    )
    return build_target_worker(config, checkpoints["target"])


def test_only_shapes_that_occur() -> None:
    """1..max_num_seqs sequences of 1..K+1 rows, contexts that leave room for the rows."""
    shapes = profiled_shapes(6, 5, 250)
    assert all(1 <= shape.num_sequences <= 6 for shape in shapes)
    assert all(1 <= shape.rows_each <= 6 for shape in shapes)
    assert all(max(shape.contexts(250)) <= 250 for shape in shapes)
    assert len(set(shapes)) == len(shapes)


def test_the_corners_come_first() -> None:
    """If time is short, one and all sequences with one and all rows are known."""
    corners = {(each.num_sequences, each.rows_each) for each in profiled_shapes(16, 8, 999)[:4]}
    assert corners == {(1, 1), (1, 9), (16, 1), (16, 9)}


def test_no_speculation_no_draft_rows() -> None:
    """With K = 0 and one sequence there is one shape at each context."""
    assert profiled_shapes(1, 0, 100) == [ProfiledShape(1, 1, 64), ProfiledShape(1, 1, 100)]


def test_without_time_the_corners_are_measured_all_the_same(worker: TargetWorker) -> None:
    """A budget of nothing still gives a table that covers the range."""
    points = measure_points(
        worker,
        max_num_seqs=4,
        max_num_speculative_tokens=3,
        max_model_len=256,
        budget_seconds=0,
    )
    assert len(points) == NUM_CORNERS
    assert {(shape.num_sequences, shape.num_rows) for shape in points} == {
        (1, 1),
        (1, 4),
        (4, 4),
        (4, 16),
    }
    assert all(seconds > 0 for seconds in points.values())


def test_the_table_is_monotone_in_rows(worker: TargetWorker) -> None:
    """More rows never cost less, whatever was measured."""
    table = profile_steps(
        worker,
        max_num_seqs=4,
        max_num_speculative_tokens=3,
        max_model_len=256,
        budget_seconds=0.1,
    )
    for shape in table.points:
        costs = [table.seconds(shape, extra) for extra in range(20)]
        assert costs == sorted(costs)


def test_nothing_of_it_is_left(worker: TargetWorker, checkpoints: dict[str, Path]) -> None:
    """A profiled target answers to the last bit what one that was not profiled answers."""
    measure_points(
        worker, max_num_seqs=4, max_num_speculative_tokens=3, max_model_len=256, budget_seconds=0
    )
    config = TargetConfig(
        model=str(checkpoints["target"]), max_model_len=256, max_num_seqs=4, block_size=16
    )
    fresh = build_target_worker(config, checkpoints["target"])
    rows = SequenceRows(
        seq_id=1,
        block_table=(0, 1, 2, 3, 4),
        start=0,
        token_ids=tuple(range(3, 70)),
        sampling=SamplingSpec(seed=3),
        logprobs=True,
        top_logprobs=3,
    )
    step = StepInput(1, (rows,))
    assert worker.step(step) == fresh.step(step)


def test_blocks_are_shared_when_there_are_few(checkpoints: dict[str, Path]) -> None:
    """A target with memory for one context is profiled with four sequences at once."""
    config = TargetConfig(
        model=str(checkpoints["target"]), max_model_len=128, block_size=16, num_blocks=8
    )
    worker = build_target_worker(config, checkpoints["target"])
    points = measure_points(
        worker, max_num_seqs=4, max_num_speculative_tokens=1, max_model_len=128, budget_seconds=0
    )
    assert max(shape.num_sequences for shape in points) == 4
    assert torch.isfinite(worker.cache.layers).all()
