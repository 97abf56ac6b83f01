"""`drafthouse advise`, from a configuration and from a page over HTTP."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import parse_config
from cluster.control.policy import StepShape
from cluster.profiling.store import ProfileKey, model_identity, save_points
from cluster.tools.choosing.configured import configured_facts, joined
from cluster.tools.choosing.facts import DrafterFacts, Facts, Place, StepCosts
from tests.tools.choosing.test_telemetry import Cluster, http_server


def stored(profiles: Path, folder: Path, *, max_num_seqs: int, seconds: float) -> None:
    """A profile of this model in which every row costs a tenth of a step."""
    key = ProfileKey(
        model=model_identity(folder),
        dtype="float32",
        processor="A processor",
        num_threads=2,
        num_ranks=1,
        torch="2.13",
        max_num_seqs=max_num_seqs,
        max_num_speculative_tokens=8,
        max_model_len=512,
        block_size=512,
    )
    points = {
        StepShape(num_sequences=1, num_rows=rows, num_context_tokens=64): (
            seconds * (1 + 0.1 * (rows - 1))
        )
        for rows in (1, 2, 4, 9)
    }
    save_points(profiles, key, points)


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of profiles of each test's own."""
    folder = tmp_path / "profiles"
    monkeypatch.setenv("DRAFTHOUSE_PROFILES", str(folder))
    return folder


def test_a_configuration_is_weighed_with_its_stored_profile(
    checkpoints: dict[str, Path], profiles: Path
) -> None:
    """Memory from the shapes, steps from the profile of the nearest sizes, drafters as placed."""
    target = checkpoints["target"]
    stored(profiles, target, max_num_seqs=4, seconds=0.01)
    stored(profiles, target, max_num_seqs=64, seconds=5.0)
    (profiles / "torn.json").write_text("{")
    config = parse_config(
        {
            "target": {"model": str(target), "max_num_seqs": 4, "max_model_len": 512},
            "drafter": {"kind": "model", "model": str(checkpoints["sibling"]), "name": "s"},
        }
    )
    facts = configured_facts(config)
    assert facts.costs is not None
    assert facts.costs.floor_seconds == pytest.approx(0.01, rel=0.05)
    assert facts.costs.seconds(9) == pytest.approx(0.018, rel=0.05)
    assert min(facts.weight_bytes or 0, facts.kv_bytes or 0, facts.available_bytes or 0) > 0
    [drafter] = facts.drafters
    assert (drafter.name, drafter.place, drafter.num_workers) == ("s", Place.WORKERS, 1)
    assert drafter.memory_bytes > 0
    other = parse_config({"target": {"model": str(target), "dtype": "int8", "max_model_len": 512}})
    assert configured_facts(other).costs is None


def test_what_was_seen_outweighs_what_was_configured() -> None:
    """Live figures stand; the profile gives the shape of the costs, the steps seen their size."""
    live = Facts(
        model="m",
        running=3.0,
        costs=StepCosts.of([(1, 0.04), (16, 0.05)]),
        drafters=(DrafterFacts(name="s", survival=(0.5,)),),
    )
    planned = Facts(
        model="m",
        costs=StepCosts.of([(1, 0.02), (9, 0.06)]),
        weight_bytes=5,
        drafters=(DrafterFacts(name="s", place=Place.COLOCATED, memory_bytes=7),),
    )
    both = joined(live, planned)
    assert both.costs is not None
    assert (both.costs.seconds(1), both.costs.seconds(9)) == pytest.approx((0.04, 0.12))
    assert (both.running, both.weight_bytes) == (3.0, 5)
    [drafter] = both.drafters
    assert (drafter.survival, drafter.place, drafter.memory_bytes) == ((0.5,), Place.COLOCATED, 7)


@pytest.mark.wire
def test_the_command_reads_a_live_page() -> None:
    """JSON for programs, words for people, and the same advice in both."""
    cluster = Cluster()
    cluster.work(20)
    cluster.answer(200, 50)
    with http_server(cluster.page(), key="k") as address:
        options = ["advise", "--address", address, "--seconds", "0", "--api-key", "k"]
        result = CliRunner().invoke(app, [*options, "--json"])
        assert result.exit_code == 0, result.output
        advice = json.loads(result.stdout)
        words = CliRunner().invoke(app, options)
    assert (advice["answer"], advice["drafter"], advice["place"]) == ("yes", "small", "workers")
    assert 1 <= advice["depth"] <= 4
    assert "Speculate: yes" in words.stdout
    assert "Speculate, with small" in words.stdout


def test_something_has_to_be_asked() -> None:
    """Neither an address nor a configuration is a typo."""
    result = CliRunner().invoke(app, ["advise"])
    assert result.exit_code == 2
    assert "--address" in result.output


def test_a_configuration_alone_can_be_asked(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Memory is told; of steps that were never timed nothing is, and how to time them is."""
    path = tmp_path / "config.yaml"
    path.write_text(f"target: {{model: {checkpoints['target']}, max_model_len: 300}}\n")
    result = CliRunner().invoke(app, ["advise", "--config", str(path), "--json"])
    assert result.exit_code == 0, result.output
    advice = json.loads(result.stdout)
    assert (advice["answer"], advice["depth"]) == ("unknown", 0)
    assert "drafthouse profile" in advice["findings"][0]["because"]
    [memory] = [each for each in advice["findings"] if each["topic"] == "memory"]
    assert memory["figures"]["weight_bytes"] > 0
