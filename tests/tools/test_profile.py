"""`drafthouse profile` on a tiny model: what it prints, draws and stores."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.control.cost import CostTable
from cluster.control.policy import StepShape
from cluster.errors import MissingExtra
from cluster.profiling.store import ProfileKey
from cluster.tools.profile import ProfileReport
from cluster.tools.profile_picture import draw_profile

KEY = ProfileKey(
    model="abc",
    dtype="float32",
    processor="A processor",
    num_threads=2,
    num_ranks=1,
    torch="2.13",
    max_num_seqs=8,
    max_num_speculative_tokens=7,
    max_model_len=2048,
    block_size=2048,
)


def report(ridge: int) -> ProfileReport:
    """A profile of a machine that is flat up to so many rows, and linear in rows beyond."""
    points = {
        StepShape(num_sequences=batch, num_rows=batch * rows, num_context_tokens=65 * batch): (
            0.02 * max(1.0, batch * rows / ridge)
        )
        for batch in (1, 8)
        for rows in range(1, 9)
    }
    return ProfileReport("a model", KEY, CostTable(points))


@pytest.mark.parametrize("ridge", [8, 16, 24])
def test_the_ridge_is_where_steps_begin_to_grow(ridge: int) -> None:
    """On a machine that is exactly flat and then exactly linear it is found."""
    found = report(ridge).ridge
    assert found == pytest.approx(ridge, rel=0.15)


def test_a_machine_that_is_flat_has_no_ridge() -> None:
    """Nothing is said about rows that were not measured."""
    assert report(10**6).ridge is None


def test_drafts_pay_below_the_ridge_only() -> None:
    """One sequence takes all drafts, eight at the ridge take few, the better the more."""
    by_case = {(each.num_sequences, each.acceptance): each for each in report(8).expected}
    assert by_case[1, 0.9].best == 7
    assert by_case[8, 0.5].best == 0
    assert by_case[8, 0.5].gain == 1.0
    gains = [by_case[1, acceptance].gain for acceptance in (0.5, 0.7, 0.9)]
    assert gains == sorted(gains)


def profile(*arguments: object) -> Any:  # noqa: ANN401 - JSON
    """What `drafthouse profile ... --json` prints."""
    result = CliRunner().invoke(app, ["profile", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_command(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints every point as JSON and draws a PNG."""
    monkeypatch.setattr("cluster.tools.profile.BUDGET_SECONDS", 0.2)
    monkeypatch.setenv("DRAFTHOUSE_PROFILES", str(tmp_path))
    picture = tmp_path / "profile.png"
    found = profile(
        *("--target", checkpoints["target"], "--max-num-seqs", 2, "--max-model-len", 128),
        *("--num-speculative-tokens", 2, "--png", picture),
    )
    assert found["measured_on"]["max_num_seqs"] == 2
    assert {"num_sequences", "num_rows", "num_context_tokens", "seconds"} == set(found["points"][0])
    assert all(len(each["rates"]) == 3 for each in found["expected"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the error says which extra brings it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"drafthouse\[plot\]"):
        draw_profile(report(8), tmp_path / "profile.png")
    assert not list(tmp_path.iterdir())
