"""`drafthouse compare-drafts` on tiny models: what it finds and says, not how fast they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.tools.test_bench_page import check_alone

CATEGORIES = ("copy", "code", "chat", "math")


def compared(*arguments: object, code: int = 0) -> str:
    """What the command prints."""
    result = CliRunner().invoke(app, ["compare-drafts", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page goes."""
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def found(checkpoints: dict[str, Path], folder: Path) -> Any:  # noqa: ANN401 - JSON
    """The target itself, prompt lookup, a poor draft, and one of another vocabulary."""
    other = make_checkpoint(folder / "other", hidden_size=32)
    make_tokenizer(other, corpus=("zebras zip zigzag through the zoo, zebras zoom.",) * 4)
    drafts = (checkpoints["target"], "ngram", checkpoints["random"], other)
    options = {
        "--target": checkpoints["target"],
        "--num-speculative-tokens": "2,4",
        "--concurrency": "1,2",
        "--num-prompts": 4,
        "--max-tokens": 16,
        "--rounds": 1,
        "--report": folder / "page.html",
    }
    named = [part for draft in drafts for part in ("--draft", draft)]
    return json.loads(
        compared(*named, *(part for option in options.items() for part in option), "--json")
    )


def candidate(found: Any, draft: object) -> Any:  # noqa: ANN401 - JSON
    """What was found of one draft."""
    [its] = [each for each in found["candidates"] if each["draft"] == str(draft)]
    return its


def test_every_draft_is_measured_with_every_k_at_every_concurrency(
    found: Any,  # noqa: ANN401 - JSON
    checkpoints: dict[str, Path],
) -> None:
    """Predicted and measured in the same run, with the error; no token changes."""
    for draft in (checkpoints["target"], "ngram", checkpoints["random"]):
        its = candidate(found, draft)
        cells = [(cell["concurrency"], cell["num_speculative_tokens"]) for cell in its["measured"]]
        assert cells == [(1, 2), (1, 4), (2, 2), (2, 4)]
        assert list(its["categories"]) == list(CATEGORIES)
        for cell in its["measured"]:
            assert cell["same_tokens"]
            assert min(cell["predicted_speedup"], cell["measured_speedup"]) > 0
            error = cell["predicted_speedup"] / cell["measured_speedup"] - 1
            assert cell["prediction_error"] == pytest.approx(error)
            assert cell["step_seconds"] > cell["draft_wait_seconds"] > 0
            assert cell["wasted_seconds"] >= 0
        assert [each["concurrency"] for each in its["expected_under_control"]][:3] == [1, 2, 4]


def test_what_is_kept_is_told_by_category_and_position(
    found: Any,  # noqa: ANN401 - JSON
    checkpoints: dict[str, Path],
) -> None:
    """The target keeps all it drafted itself, and little of another's; a model costs time."""
    own, other = (candidate(found, checkpoints[name]) for name in ("target", "random"))
    assert own["all"]["draft_acceptance_rate"] > 0.95
    assert len(own["all"]["survival_by_position"]) == 4
    assert min(own["all"]["survival_by_position"]) > 0.9
    assert own["all"]["acceptance_length"] > 4
    assert other["all"]["draft_acceptance_rate"] < 0.5
    assert min(own["memory_bytes"], own["draft_token_seconds"]) > 0
    assert candidate(found, "ngram")["memory_bytes"] == 0
    parts = own["categories"].values()
    assert sum(part["num_drafted"] for part in parts) == own["all"]["num_drafted"]


def test_what_does_not_fit_is_left_out_and_said(
    found: Any,  # noqa: ANN401 - JSON
    folder: Path,
) -> None:
    """Another vocabulary is refused by the first id that differs, and the rest is compared."""
    other = candidate(found, folder / "other")
    assert not other["fits"]
    assert "token id" in other["problems"][0]
    assert other["measured"] == []
    assert any("was left out" in words for words in found["words"])


def test_words_say_what_to_take_and_what_waste_costs(
    found: Any,  # noqa: ANN401 - JSON
    checkpoints: dict[str, Path],
) -> None:
    """A choice for each concurrency, a limit for each draft, and costs where little is kept."""
    words = found["words"]
    assert [each.split(":")[0] for each in words[:2]] == ["1 at once", "2 at once"]
    assert sum("pay" in each for each in words) >= 3
    [explained] = [each for each in words if each.startswith(f"{checkpoints['random']}: ")]
    assert "of its drafts are kept" in explained
    assert "rows that are thrown away take" in explained
    assert not any(each.startswith(f"{checkpoints['target']}: ") for each in words)


def test_the_page_is_whole_and_alone(
    found: Any,  # noqa: ANN401 - JSON
    folder: Path,
) -> None:
    """All tables and pictures in one file that fetches nothing, and the words are in it."""
    page = check_alone((folder / "page.html").read_text())
    assert page.tags.count("svg") == 2 + 3 + 1
    assert page.tags.count("table") == 3
    assert set(found["words"]) <= set(page.texts)


def test_categories_come_from_the_file(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Lines of any kind, by the field that was named; people get tables and words."""
    path = tmp_path / "prompts.jsonl"
    lines = (
        {"prompt": "a b a b a b", "task": "letters"},
        {"turns": ["count to ten", "and back"], "task": "numbers"},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ("--target", checkpoints["target"], "--draft", "ngram", "--prompts", path)
    small = ("--concurrency", 1, "--num-prompts", 3, "--max-tokens", 8, "--rounds", 1)
    printed = compared(*options, "--category-field", "task", *small)
    for part in ("letters", "numbers", "all", "predicted", "measured", "1 at once: "):
        assert part in printed


def test_no_draft_that_fits_is_a_failure(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The exit status says so, and the reason is printed."""
    options = ("--target", checkpoints["target"], "--draft", tmp_path / "nothing.gguf")
    assert "no such file" in compared(*options, code=1)
