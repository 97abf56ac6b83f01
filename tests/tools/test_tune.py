"""`drafthouse tune ngram` and its replay, over a tiny random llama."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import NgramDrafterConfig
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.table import build_table, load_table
from cluster.errors import ConfigurationError
from cluster.local_drafter import check_draft
from cluster.tools.replay import Answered, replay
from cluster.tools.tune import evaluate, read_answers

CYCLE = Answered((1, 2, 3, 1, 2), (3, 1, 2, 3, 1, 2, 3, 1, 2, 3))


def test_a_replay_counts_what_would_have_been_verified_and_kept() -> None:
    """One token comes with the prompt; nine more take 4 drafts and one token, twice less one."""
    its = replay(NgramDrafter(), [CYCLE], num_speculative_tokens=4)
    assert (its.num_steps, its.num_drafted, its.num_accepted) == (2, 7, 7)
    assert its.accepted_per_step == 3.5


@given(
    answers=st.lists(
        st.builds(
            Answered,
            st.lists(st.integers(0, 3), max_size=5).map(tuple),
            st.lists(st.integers(0, 3), max_size=20).map(tuple),
        ),
        max_size=4,
    ),
    limit=st.integers(1, 6),
)
def test_steps_and_kept_drafts_make_up_the_answers(answers: list[Answered], limit: int) -> None:
    """Every token but the first of each answer is a step's own or a kept draft."""
    its = replay(NgramDrafter(), answers, num_speculative_tokens=limit)
    assert its.num_steps + its.num_accepted == sum(
        max(len(answered.answer_token_ids) - 1, 0) for answered in answers
    )
    assert its.num_accepted <= its.num_drafted <= limit * its.num_steps


def test_a_table_is_measured_on_answers_it_was_not_made_of() -> None:
    """Answers that say something once each gain by others that say it, and not by themselves."""
    alone = [Answered((1, 2), tuple(range(100 * each, 100 * each + 20))) for each in range(1, 6)]
    assert evaluate(alone, 4).with_table.num_accepted == 0
    same = [Answered((1, 2), tuple(range(100, 120)))] * 5
    assert evaluate(same, 4).with_table.num_accepted > 50
    assert evaluate(same, 4).own_text.num_accepted == 0


def test_the_command_writes_a_table_of_the_targets_answers(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Generated, saved, evaluated; the same from the saved answers; accepted by that target."""
    target, out = str(checkpoints["target"]), tmp_path / "ngrams"
    (tmp_path / "prompts").write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    saved = tmp_path / "answers"
    command = ["tune", "ngram", "--target", target, "--json", "--evaluate"]
    asking = ["--prompts", f"jsonl:{tmp_path / 'prompts'}", "--max-tokens", "12"]
    options = ["--dtype", "float32", "--save-answers", str(saved), "--out", str(out)]
    first = CliRunner().invoke(app, [*command, *asking, *options], catch_exceptions=False)
    found = json.loads(first.stdout)
    assert (
        found["num_answers"],
        [each["num_speculative_tokens"] for each in found["evaluations"]],
    ) == (2, [4, 8])
    again = tmp_path / "again"
    reading = ["--answers", str(saved), "--out", str(again)]
    second = CliRunner().invoke(app, [*command, *reading], catch_exceptions=False)
    assert json.loads(second.stdout) == found | {"out": str(again)}
    answers = read_answers(saved, target)
    assert sum(len(answered.answer_token_ids) for answered in answers) == found["num_tokens"]
    begins = answers[0].prompt_token_ids[-3:]
    assert load_table(out).entries(begins)[0].token_id == answers[0].answer_token_ids[0]
    check_draft(NgramDrafterConfig(table=out), target_folder=checkpoints["target"])


def test_a_table_of_another_vocabulary_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Its ids would mean other tokens: an error at start that names the file."""
    build_table([[1, 2, 3]], vocabulary="of another model").save(tmp_path / "table")
    with pytest.raises(ConfigurationError, match="table: made of another vocabulary"):
        check_draft(
            NgramDrafterConfig(table=tmp_path / "table"), target_folder=checkpoints["target"]
        )


@pytest.mark.parametrize(
    "line", ["no json", "[]", "{}", '{"answer_token_ids": [1, "2"]}', '{"answer_token_ids": [-1]}']
)
def test_what_is_no_answer_is_refused_by_its_line(
    checkpoints: dict[str, Path], tmp_path: Path, line: str
) -> None:
    """A text or token ids, else an error that names the line."""
    (tmp_path / "answers").write_text(f'{{"text": "one two"}}\n{line}\n')
    with pytest.raises(ConfigurationError, match="line 2"):
        read_answers(tmp_path / "answers", str(checkpoints["target"]))
