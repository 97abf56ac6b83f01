"""The list of fields: one source for the command, the README and GetModel."""

from pathlib import Path

from typer.testing import CliRunner

from cluster.cli import app
from cluster.tools.fields import EXACT_FIELDS, REFUSED_FIELDS, fields_table
from cluster.tools.openai_fields import openai_fields_table

README = Path(__file__).parents[2] / "README.md"


def test_the_command_prints_the_table_as_it_is() -> None:
    """Not wrapped at any width, so that it can go to a file."""
    done = CliRunner().invoke(app, ["fields"], env={"COLUMNS": "40"})
    assert (done.exit_code, done.output) == (0, fields_table() + "\n")


def test_the_readme_has_the_commands_output() -> None:
    """What it says of fields is what is served."""
    assert fields_table() in README.read_text()
    assert openai_fields_table() in README.read_text()


def test_every_field_is_in_the_table_once() -> None:
    """By its part of the request and its name."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in fields_table().splitlines()[2:]
    ]
    listed = [
        (served, ".".join([*([] if part == "itself" else [part.strip("`")]), name.strip("`")]))
        for served, part, names in rows
        for name in names.split(", ")
    ]
    assert sorted(listed) == sorted(
        [("exact", path) for path in EXACT_FIELDS] + [("refused", path) for path in REFUSED_FIELDS]
    )
