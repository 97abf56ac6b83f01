"""Stored profiles: found by the machine and model they are of, and by nothing else."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import TargetConfig
from cluster.control.policy import StepShape
from cluster.local import build_target_worker
from cluster.profiling import store
from cluster.profiling.store import (
    ProfileKey,
    is_disturbed,
    load_points,
    model_identity,
    save_points,
    stored_profile,
)
from cluster.worker import TargetWorker
from tests.checkpoints import edit_config, make_checkpoint

KEY = ProfileKey(
    model="abc",
    dtype="int8",
    processor="A processor",
    num_threads=2,
    num_ranks=1,
    torch="2.13",
    max_num_seqs=16,
    max_num_speculative_tokens=4,
    max_model_len=2048,
    block_size=2048,
)
POINTS = {
    StepShape(num_sequences=1, num_rows=1, num_context_tokens=65): 0.02,
    StepShape(num_sequences=2, num_rows=8, num_context_tokens=130): 0.0375,
}


def rewrite(profiles: Path, change: object) -> None:
    """Put something else into the only stored file."""
    [path] = profiles.iterdir()
    path.write_text(change if isinstance(change, str) else json.dumps(change))


def content(profiles: Path) -> dict[str, list[object]]:
    """What the only stored file holds."""
    [path] = profiles.iterdir()
    data: dict[str, list[object]] = json.loads(path.read_text())
    return data


def test_what_is_stored_is_found_again(tmp_path: Path) -> None:
    """The points come back to the last bit, and only one whole file is left."""
    save_points(tmp_path / "new", KEY, POINTS)
    assert load_points(tmp_path / "new", KEY) == POINTS
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "abd"},
        {"dtype": "float32"},
        {"processor": "Another"},
        {"num_threads": 1},
        {"num_ranks": 2},
        {"torch": "2.14"},
        {"max_num_seqs": 8},
        {"max_num_speculative_tokens": 5},
        {"max_model_len": 1024},
        {"block_size": 16},
        {"version": 0},
    ],
)
def test_another_key_finds_nothing(tmp_path: Path, change: dict[str, object]) -> None:
    """Whatever a step's time depends on, a change of it is a profile of its own."""
    save_points(tmp_path, KEY, POINTS)
    assert load_points(tmp_path, replace(KEY, **change)) is None  # type: ignore[arg-type]


def test_a_foreign_file_under_the_name_is_ignored(tmp_path: Path) -> None:
    """The key inside the file counts, not its name."""
    save_points(tmp_path, KEY, POINTS)
    other = content(tmp_path) | {"key": {"model": "another"}}
    rewrite(tmp_path, other)
    assert load_points(tmp_path, KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        "",
        "{",
        "[]",
        "null",
        '{"points": []}',
        "\udc80".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_a_corrupt_file_is_ignored(tmp_path: Path, change: str) -> None:
    """A file that is cut off, or of something else, is as good as none."""
    save_points(tmp_path, KEY, POINTS)
    rewrite(tmp_path, change)
    assert load_points(tmp_path, KEY) is None


@pytest.mark.parametrize(
    "point",
    [[1, 5, 65, -1.0], [1, 5, 65, None], [1, 0, 65, 0.1], [1, 1.5, 65, 0.1], [1, 5, 0.1], [], 5],
)
def test_points_that_make_no_sense_are_ignored(tmp_path: Path, point: object) -> None:
    """One such point, and the whole file is not believed."""
    save_points(tmp_path, KEY, POINTS)
    data = content(tmp_path)
    data["points"].append(point)
    rewrite(tmp_path, data)
    assert load_points(tmp_path, KEY) is None


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The profile is used, and one line says that it was not stored."""
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        save_points(tmp_path / "file", KEY, POINTS)
    assert len(caplog.records) == 1


def test_models_of_one_shape_share_their_profile(tmp_path: Path) -> None:
    """Weights do not decide how long a step takes, their shape does."""
    first = make_checkpoint(tmp_path / "first", seed=1, vocab_size=64)
    same = make_checkpoint(tmp_path / "same", seed=2, vocab_size=64)
    assert model_identity(first) == model_identity(same)
    edit_config(same, rope_theta=2.0)
    assert model_identity(first) != model_identity(same)


def test_steps_out_of_order_are_a_sign_of_disturbance() -> None:
    """More rows in much less time, all else equal, happens only beside another's load."""
    assert not is_disturbed(POINTS)
    more = StepShape(num_sequences=1, num_rows=5, num_context_tokens=65)
    assert not is_disturbed(POINTS | {more: 0.019})
    assert is_disturbed(POINTS | {more: 0.01})


@pytest.fixture
def worker(checkpoints: dict[str, Path]) -> TargetWorker:
    """A target for two sequences."""
    config = TargetConfig(model=str(checkpoints["target"]), max_model_len=128, max_num_seqs=2)
    return build_target_worker(config, checkpoints["target"])


def test_a_warm_start_measures_nothing(
    worker: TargetWorker,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first start measures and stores, the second reads, and a corrupt file is replaced."""
    measured: list[object] = []

    def measure(*_: object, **sizes: object) -> dict[StepShape, float]:
        measured.append(sizes)
        return POINTS

    monkeypatch.setattr(store, "measure_points", measure)

    def start() -> object:
        return stored_profile(
            worker,
            folder=checkpoints["target"],
            dtype="float32",
            max_num_seqs=2,
            max_num_speculative_tokens=2,
            max_model_len=128,
            profiles=tmp_path,
        ).points

    assert start() == start() == POINTS
    assert len(measured) == 1
    rewrite(tmp_path, "{")
    assert start() == start() == POINTS
    assert len(measured) == 2


def test_a_disturbed_profile_is_used_and_not_kept(
    worker: TargetWorker,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured beside another's load must not slow down all later starts."""
    more = StepShape(num_sequences=1, num_rows=5, num_context_tokens=65)
    disturbed = POINTS | {more: 0.001}
    monkeypatch.setattr(store, "measure_points", lambda *_, **__: disturbed)
    table = stored_profile(
        worker,
        folder=checkpoints["target"],
        dtype="float32",
        max_num_seqs=2,
        max_num_speculative_tokens=2,
        max_model_len=128,
        profiles=tmp_path / "none",
    )
    assert table.points == disturbed
    assert not (tmp_path / "none").exists()
