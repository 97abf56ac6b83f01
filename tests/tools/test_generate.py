"""One answer in one process, on a tiny checkpoint."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import DrafthouseConfig, parse_config
from cluster.errors import InvalidRequest
from cluster.request import Grammar, GrammarKind
from cluster.tools.generate import Prompt, generate


@pytest.fixture
def config(checkpoints: dict[str, Path]) -> DrafthouseConfig:
    """Without drafts, in one thread."""
    target = {"model": str(checkpoints["target"]), "max_model_len": 128, "num_threads": 1}
    return parse_config({"target": target, "drafter": {"kind": "off"}})


async def test_an_answer_matches_its_grammar(config: DrafthouseConfig) -> None:
    """What is shown piece by piece is the whole text, and the expression matches it."""
    shown: list[str] = []
    grammar = Grammar(GrammarKind.REGEX, "[ab]{3}-[0-9]{2}")
    answer = await generate(
        config,
        Prompt(text="x", seed=1, grammar=grammar),
        show=lambda delta: shown.append(delta.text),
    )
    assert re.fullmatch(grammar.source, answer.text)
    assert "".join(shown) == answer.text


async def test_a_grammar_that_is_none_is_refused(config: DrafthouseConfig) -> None:
    """Before any model is loaded, as the server would."""
    prompt = Prompt(text="x", grammar=Grammar(GrammarKind.REGEX, "("))
    with pytest.raises(InvalidRequest, match=r"^grammar\.regex: "):
        await generate(config, prompt, show=lambda _: None)


def test_the_commands_options_for_grammars(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A schema comes from a file; it and an expression exclude each other."""
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["one", "two"]}))
    command = ["generate", "x", "--target", str(checkpoints["target"]), "--draft", "off"]
    options = ["--json-schema", str(schema)]
    done = CliRunner().invoke(app, [*command, *options, "--json"])
    assert json.loads(json.loads(done.stdout)["text"]) in ("one", "two")
    done = CliRunner().invoke(app, [*command, *options, "--regex", "a"])
    assert done.exit_code == 2
    assert "exclude each other" in done.output
