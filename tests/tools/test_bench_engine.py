"""`drafthouse bench` and its commands on small random models: shapes and rules, no speed."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.errors import ConfigurationError
from cluster.tools.bench.engine import EnginePlan, bench_engine
from cluster.tools.bench.lanes import Variant
from cluster.tools.bench.progress import bars, silent
from cluster.tools.bench.steps import SHAPES
from cluster.tools.bench.workloads import parse_workload


def bench(*arguments: object) -> Any:  # noqa: ANN401 - JSON
    """What `drafthouse bench ... --json` prints."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def report(checkpoints: dict[str, Path]) -> Any:  # noqa: ANN401 - JSON
    """Two concurrencies, two number formats, n-gram and sibling drafts, transformers beside."""
    options = {
        "--workload": "copy",
        "--target": checkpoints["target"],
        "--concurrency": "1,2",
        "--dtype": "float32,int8",
        "--num-speculative-tokens": 3,
        "--num-prompts": 2,
        "--max-tokens": 12,
        "--rounds": 2,
    }
    drafts = ("--draft", "ngram", "--draft", checkpoints["sibling"])
    flat = [part for option in options.items() for part in option]
    return bench("engine", *flat, *drafts, "--transformers")


def rows(report: Any, **fields: object) -> list[Any]:  # noqa: ANN401 - JSON
    """The rows that have those fields."""
    return [row for row in report["rows"] if fields.items() <= row.items()]


def test_there_is_a_row_for_every_combination(
    report: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    """Concurrency x number format x drafts, off always among them, and one of transformers."""
    keys = ("concurrency", "dtype", "draft", "num_speculative_tokens")
    drafts = (("off", None), ("ngram", 3), (str(checkpoints["sibling"]), 3))
    expected = {
        (concurrency, dtype, *draft)
        for concurrency in (1, 2)
        for dtype in ("float32", "int8")
        for draft in drafts
    } | {(concurrency, "float32", "transformers", None) for concurrency in (1, 2)}
    assert {tuple(row[key] for key in keys) for row in report["rows"]} == expected
    assert len(report["rows"]) == len(expected)


def test_rows_are_complete(report: dict[str, Any]) -> None:
    """Rates, percentiles, acceptance and, for engines, where the mean step's time went."""
    for row in report["rows"]:
        assert row["num_requests"] == 4
        assert row["tokens_per_second"] > 0
        assert set(row["first_token_seconds"]) == {"p50", "p95"}
        assert set(row["inter_token_seconds"]) == {"p50", "p95", "p99"}
        assert row["ratio_to_transformers"] > 0
        if row["draft"] == "transformers":
            assert row["step"] is None
            continue
        parts = ("draft_wait", "target_forward", "target_sample", "engine_rest")
        seconds = [row["step"][f"{part}_seconds"] for part in parts]
        assert all(each >= 0 for each in seconds)
        assert sum(seconds) == pytest.approx(row["step"]["step_seconds"])


def test_what_is_compared_with_itself_is_one(report: dict[str, Any]) -> None:
    """A row's baselines are of its own concurrency: without drafts, in float32, transformers'."""
    assert {row["ratio_to_off"] for row in rows(report, draft="off")} == {1.0}
    assert {row["ratio_to_float32"] for row in rows(report, dtype="float32")} == {1.0}
    assert all(row["ratio_to_float32"] > 0 for row in rows(report, dtype="int8"))
    assert {row["ratio_to_transformers"] for row in rows(report, draft="transformers")} == {1.0}


def test_drafts_change_no_token(report: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    """Whatever was measured answered the same, and a sibling's drafts were really used."""
    engines = [row for row in report["rows"] if row["draft"] != "transformers"]
    assert all(row["same_tokens_as_off"] for row in engines)
    for row in rows(report, draft=str(checkpoints["sibling"])):
        assert row["acceptance_length"] > 1
        assert 0 < row["draft_acceptance_rate"] <= 1
        assert row["step"]["draft_wait_seconds"] > 0
    for row in rows(report, draft="off"):
        assert row["acceptance_length"] == 1
        assert row["draft_acceptance_rate"] is None
        assert row["step"]["draft_wait_seconds"] == 0


def test_transformers_answers_what_the_engine_answers(report: dict[str, Any]) -> None:
    """Greedy in float32, padded batches and ends included: the same work is compared."""
    baselines = rows(report, draft="transformers")
    assert len(baselines) == 2
    assert all(row["same_tokens_as_off"] for row in baselines)


async def test_zero_drafts_of_a_drafter_is_a_row(checkpoints: dict[str, Path]) -> None:
    """K = 0 with a drafter at hand is compared with an engine that has none."""
    plan = EnginePlan(
        target=str(checkpoints["target"]),
        workload=parse_workload("chat"),
        num_speculative_tokens=(0,),
        num_prompts=1,
        max_tokens=4,
        rounds=1,
    )
    assert plan.variants == [Variant("float32"), Variant("float32", "ngram", 0)]
    off, zero = (await bench_engine(plan, report=silent)).rows
    assert zero.rounds.acceptance_rate is None
    assert zero.rounds.answers == off.rounds.answers


async def test_prompts_beyond_the_context_are_named(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A prompt that cannot be answered is refused before anything is measured."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "% " * 3000}))
    plan = EnginePlan(
        target=str(checkpoints["target"]), workload=parse_workload(f"jsonl:{path}"), num_prompts=2
    )
    with pytest.raises(ConfigurationError, match="prompt 2 has"):
        await bench_engine(plan, report=silent)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--concurrency", "0"),
        ("--concurrency", "1,two"),
        ("--num-speculative-tokens", "-1"),
        ("--dtype", "float8"),
        ("--verification", "guess"),
    ],
)
def test_a_wrong_value_names_its_option(option: str, value: str) -> None:
    """Nothing is loaded for a typo."""
    result = CliRunner().invoke(app, ["bench", "engine", option, value])
    assert result.exit_code == 2
    assert option in result.output


def test_steps_are_split_into_matrices_and_the_rest(checkpoints: dict[str, Path]) -> None:
    """Every shape in every format, with the time of its linear layers alone beside it."""
    report = bench(
        "steps", "--target", checkpoints["target"], "--dtype", "float32,int8", "--repeats", 1
    )
    measured = [(step["dtype"], step["sequences"], step["rows"]) for step in report]
    assert measured == [(dtype, *shape) for dtype in ("float32", "int8") for shape in SHAPES]
    for step in report:
        share = 1 - step["matrix_seconds"] / step["seconds"]
        assert step["matrix_seconds"] > 0
        assert step["share_beyond_matrices"] == pytest.approx(share)


def test_a_second_turn_is_asked_with_its_history_cached_and_without(
    checkpoints: dict[str, Path],
) -> None:
    """The history is found in the one case, not in the other, and the answers are the same."""
    options = ("--history-tokens", 300, "--rounds", 2)
    [row] = bench("prefix", "--target", checkpoints["target"], *options)
    assert 300 <= row["history_tokens"] < 310
    assert row["history_tokens"] <= row["cached_tokens"] < row["prompt_tokens"]
    assert row["same_tokens"]
    assert row["ratio"] > 0


def test_a_long_prompt_arrives_while_streams_run(checkpoints: dict[str, Path]) -> None:
    """Times between tokens are taken before it came and until its own first token."""
    options = ("--num-streams", 2, "--prompt-tokens", 200, "--rounds", 1)
    [row] = bench("interference", "--target", checkpoints["target"], *options)
    assert row["prompt_tokens"] == 200
    for name in ("quiet", "disturbed"):
        times = row[f"{name}_inter_token_seconds"]
        assert 0 < times["p50"] <= times["p95"] <= times["p99"]
    assert row["ratio_p95"] > 0
    assert row["prompt_first_token_seconds"] > 0


def test_bars_are_for_people() -> None:
    """A terminal sees how far it is; a file or a program that asked for JSON sees nothing."""
    for shown, terminal in ((True, True), (True, False), (False, True)):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with bars(console, shown=shown) as report:
            report("copying", 1, 4)
        file = console.file
        assert isinstance(file, io.StringIO)
        assert ("copying" in file.getvalue()) == (shown and terminal)
