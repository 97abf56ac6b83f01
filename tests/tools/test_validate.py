"""`drafthouse validate`: what fits, what does not, and why."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.drafters.vocabulary import load_tokens
from tests.checkpoints import edit_config, make_checkpoint, make_tokenizer


def validated(target: Path, draft: object, *options: object, fits: bool) -> dict[str, Any]:
    """The verdict as JSON; the exit status has to say the same."""
    arguments = ["--target", target, "--draft", draft, *options, "--json"]
    result = CliRunner().invoke(app, ["validate", *map(str, arguments)])
    assert result.exit_code == (0 if fits else 1), result.output
    verdict: dict[str, Any] = json.loads(result.stdout)
    assert verdict["fits"] is fits
    return verdict


def finding(verdict: dict[str, Any], what: str) -> dict[str, Any]:
    """The one finding about that."""
    [found] = [each for each in verdict["findings"] if each["what"] == what]
    assert isinstance(found, dict)
    return found


def test_a_model_fits_itself(checkpoints: dict[str, Path]) -> None:
    """Same tokenizer by hash, room for both, and nearly every draft of the sample is accepted."""
    target = checkpoints["target"]
    verdict = validated(target, target, "--num-speculative-tokens", 3, fits=True)
    first, second = verdict["models"]
    assert first == second
    assert len(first["tokenizer_sha256"]) == 64
    assert first["num_tokens"] == len(load_tokens(target))
    assert first["head"] == [512, 32]
    assert all(each["fits"] for each in verdict["findings"])
    needs = {need["what"]: need["num_bytes"] for need in verdict["memory"]}
    assert needs["target weights"] == needs["draft weights"] > 0
    assert needs["target KV memory"] > 0
    expectation = verdict["expectation"]
    names = [part["workload"] for part in expectation["parts"]]
    assert names == ["copy", "code", "chat", "math", "all"]
    assert expectation["parts"][-1]["draft_acceptance_rate"] > 0.9
    assert expectation["parts"][-1]["acceptance_length"] > 2
    assert expectation["draft_wait_seconds"] > 0


def test_ngram_needs_no_second_model(checkpoints: dict[str, Path]) -> None:
    """One model is looked at, and the sample is measured all the same."""
    verdict = validated(checkpoints["target"], "ngram", "--dtype", "int8", fits=True)
    assert len(verdict["models"]) == 1
    assert verdict["expectation"]["parts"][-1]["ratio_to_off"] > 0


def test_another_vocabulary_is_refused_with_the_first_id(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """X15: a tokenizer of another text; the first id that differs is named with both tokens."""
    draft = make_checkpoint(tmp_path / "draft", hidden_size=32)
    make_tokenizer(draft, corpus=("zebras zip zigzag through the zoo, zebras zoom.",) * 4)
    ours, theirs = load_tokens(checkpoints["target"]), load_tokens(draft)
    differing = min(key for key in ours | theirs if ours.get(key) != theirs.get(key))
    verdict = validated(checkpoints["target"], draft, fits=False)
    tokenizer = finding(verdict, "tokenizer")
    assert not tokenizer["fits"]
    assert f"token id {differing}:" in tokenizer["detail"]
    first, second = verdict["models"]
    assert first["tokenizer_sha256"] != second["tokenizer_sha256"]
    assert finding(verdict, "memory")["fits"], "the rest is said in the same run"
    assert verdict["expectation"] is None


def test_padding_of_the_head_is_no_difference(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """X15: the same tokenizer under a head of more rows fits."""
    draft = make_checkpoint(tmp_path / "draft", hidden_size=32, vocab_size=640)
    make_tokenizer(draft, vocab_size=512)
    verdict = validated(checkpoints["target"], draft, "--no-sample", fits=True)
    assert [model["head"] for model in verdict["models"]] == [[512, 32], [640, 32]]


def test_a_shorter_draft_context_says_where_drafting_ends(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """X10: it fits, and sequences beyond it go on without drafts; the sample runs into that."""
    draft = make_checkpoint(tmp_path / "draft", hidden_size=32, max_position_embeddings=64)
    verdict = validated(checkpoints["target"], draft, fits=True)
    detail = finding(verdict, "draft context")["detail"]
    assert "more than 64 of 2048 tokens go on without drafts" in detail


@pytest.mark.parametrize(
    ("options", "what", "number"),
    [
        (("--max-model-len", 4096), "context", "2304"),
        (("--max-num-seqs", 4_000_000), "memory", "MiB are needed on cpu"),
    ],
)
def test_what_the_machine_or_the_model_cannot_hold_is_said_in_numbers(
    checkpoints: dict[str, Path], options: tuple[object, ...], what: str, number: str
) -> None:
    """X54: refused before anything is loaded."""
    verdict = validated(checkpoints["target"], "ngram", *options, fits=False)
    found = finding(verdict, what)
    assert not found["fits"]
    assert number in found["detail"]


def test_models_that_cannot_be_served_are_named(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """An unsupported draft and a reference to nothing are findings, each about its own model."""
    odd = edit_config(make_checkpoint(tmp_path / "odd", hidden_size=32), model_type="gpt2")
    verdict = validated(checkpoints["target"], odd, fits=False)
    assert finding(verdict, "target")["fits"]
    assert "gpt2" in finding(verdict, "draft")["detail"]
    verdict = validated(tmp_path / "nothing.gguf", "ngram", fits=False)
    assert "no such file" in finding(verdict, "target")["detail"]


def test_people_get_a_table(checkpoints: dict[str, Path]) -> None:
    """The reasons stand in it, and the exit status is the same."""
    arguments = [
        "--target",
        str(checkpoints["target"]),
        "--draft",
        "ngram",
        "--max-model-len",
        "4096",
    ]
    result = CliRunner().invoke(app, ["validate", *arguments])
    assert result.exit_code == 1
    assert "The pair does not fit" in result.stdout
    assert "max_model_len 4096" in result.stdout
