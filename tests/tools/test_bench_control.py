"""`drafthouse bench control` on small random models: which cells, which figures, and the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.tools.bench.decision import bench_decision
from cluster.tools.bench.progress import silent
from cluster.tools.bench.real import MIXED, WORKLOADS, RealPlan, prompts_of
from cluster.tools.bench.simulated import HEADINGS, bench_simulated
from tests.tools.test_bench_page import check_alone


def run(*arguments: object) -> Result:
    """`drafthouse bench control ...`."""
    return CliRunner().invoke(app, ["bench", "control", *map(str, arguments)])


def control(*arguments: object) -> Any:  # noqa: ANN401 - JSON
    """What it prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def real(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - JSON
    """The cells of a small run, and the page of it."""
    page = tmp_path_factory.mktemp("page") / "control.html"
    found = control(
        *("--part", "c", "--target", checkpoints["target"], "--report", page),
        *("--draft", f"ngram,{checkpoints['sibling']}", "--workload", "copy,random,mixed"),
        *("--concurrency", "1,2", "--fixed", "1,3", "--max-tokens", 6),
        *("--num-prompts", 2, "--rounds", 1),
    )
    return found["real"], page


def test_there_is_a_cell_for_every_combination(real: Any, checkpoints: dict[str, Path]) -> None:  # noqa: ANN401
    """Draft x workload x concurrency, each with the controller, off and every fixed K."""
    cells, _ = real
    assert {(each["draft"], each["workload"], each["concurrency"]) for each in cells} == {
        (draft, workload, concurrency)
        for draft in ("ngram", str(checkpoints["sibling"]))
        for workload in ("copy", "random", "mixed")
        for concurrency in (1, 2)
    }
    assert len(cells) == 12
    assert all(set(each["fixed_tokens_per_second"]) == {"1", "3"} for each in cells)


def test_the_controller_changes_no_token(real: Any) -> None:  # noqa: ANN401
    """All engines of a cell give the same answers."""
    cells, _ = real
    assert all(each["same_tokens"] for each in cells)


def test_ratios_are_to_the_better_of_both(real: Any) -> None:  # noqa: ANN401
    """`ratio_to_best` is the smaller of the ratios to off and to the best fixed K."""
    cells, _ = real
    for each in cells:
        ratios = each["ratio_to_off"], each["ratio_to_best_fixed"]
        assert each["ratio_to_best"] == min(ratios) > 0
        fixed = each["fixed_tokens_per_second"]
        assert fixed[str(each["best_fixed"])] == max(fixed.values())


def test_the_page_is_alone(real: Any) -> None:  # noqa: ANN401
    """The report holds a picture for each draft and a table, and fetches nothing."""
    _, page = real
    balance = check_alone(page.read_text())
    assert balance.tags.count("svg") == 2
    assert balance.tags.count("table") == 1


def test_the_mixed_workload_has_all_kinds(checkpoints: dict[str, Path]) -> None:
    """One prompt of each workload after another, so that any wave has all of them."""
    plan = RealPlan(target=str(checkpoints["target"]), concurrencies=(8,), num_prompts=8)
    kinds = [prompts_of(kind, plan) for kind in WORKLOADS if kind != MIXED]
    mixed = prompts_of(MIXED, plan)
    assert len(mixed) == 8
    for place, prompt in enumerate(mixed):
        assert prompt == kinds[place % len(kinds)][place // len(kinds)]


def test_timed_parts_and_loads(tmp_path: Path) -> None:
    """The other parts run by themselves, and share one page."""
    page = tmp_path / "control.html"
    found = control(
        *("--part", "a,load", "--way", "off,ahead", "--step-ms", 2),
        *("--seconds", 0.5, "--report", page),
    )
    assert {(each["way"], each["num_speculative_tokens"]) for each in found["timed"]} == {
        ("off", 0),
        ("ahead", 4),
        ("ahead", 8),
    }
    assert all(each["efficiency"] > 0 for each in found["timed"])
    assert [each["load"] for each in found["load"]] == sorted(
        each["load"] for each in found["load"]
    )
    assert check_alone(page.read_text()).tags.count("table") == 2


def test_a_decision_is_timed_many_times() -> None:
    """There is a time for each step after the warm-up."""
    found = bench_decision(report=silent, num_steps=20)
    assert len(found.seconds) == 20
    assert found.as_json()["num_sequences"] == 64


def test_simulated_worlds_can_be_restricted() -> None:
    """Only the worlds that are kept are played; figures are parts of the optimum."""
    found = bench_simulated(
        report=silent,
        num_steps=450,
        keep=lambda world: (
            (world.table, world.process, world.num_sequences) == ("staircase", "iid", 1)
        ),
    )
    [cell] = found.as_json()
    assert isinstance(cell["warm_to_optimum"], float)
    assert 0 < cell["warm_to_optimum"] <= 1.01
    assert "off" in cell["others_to_optimum"]  # type: ignore[operator]
    assert found.section().sheets[0].rows


def test_several_seeds_tell_the_noise() -> None:
    """A world is one row of means, whatever its seeds; each seed's figures are in the data."""
    found = bench_simulated(
        report=silent,
        num_steps=450,
        keep=lambda world: (
            (world.table, world.process, world.num_sequences) == ("memory-bound", "iid", 1)
        ),
        seeds=(3, 4),
    )
    [row] = found.section().sheets[0].rows
    assert float(row[HEADINGS.index("noise")]) >= 0
    both = [cell["warm_to_optimum"] for cell in found.as_json()]
    assert [cell["seed"] for cell in found.as_json()] == [3, 4]
    assert float(row[HEADINGS.index("warm")]) == pytest.approx(sum(both) / 2, abs=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--part", "d"), ("--way", "pigeon"), ("--concurrency", "0"), ("--seed", "x")],
)
def test_what_does_not_exist_is_refused(option: str, value: str) -> None:
    """An unknown part, way or number is an error that names the option."""
    result = run(option, value)
    assert result.exit_code != 0
    assert option in result.output
