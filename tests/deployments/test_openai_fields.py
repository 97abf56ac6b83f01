"""The table of fields says what is so."""

from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel
from typer.testing import CliRunner

from cluster.cli import app
from cluster.tools.openai_fields import (
    CHAT,
    COMPLETIONS,
    FIELDS,
    Served,
    names,
    openai_fields_table,
)
from deployments.openai_schemas import (
    ChatRequest,
    CompletionRequest,
    Speculation,
    StreamOptions,
)

TAKEN = (Served.EXACT, Served.EXTENSION, Served.NO_EFFECT)
PATHS = ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest))
NESTED: dict[str, type[BaseModel]] = {"stream_options": StreamOptions, "speculation": Speculation}


def paths(kind: type[BaseModel]) -> set[str]:
    """The fields of a body by their names in the table."""
    found = set()
    for name in kind.model_fields:
        part = NESTED.get(name)
        found |= {f"{name}.{field}" for field in part.model_fields} if part else {name}
    return found


@pytest.mark.parametrize(("path", "kind"), PATHS)
def test_what_is_taken_is_in_the_table(path: str, kind: type[BaseModel]) -> None:
    """A field that bodies may have is there once, and no other is."""
    listed = [name for served in TAKEN for name in names(served, path)]
    assert len(listed) == len(set(listed))
    assert set(listed) == paths(kind)
    assert not names(Served.REFUSED, path) & paths(kind)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        (CHAT, chat_params.CompletionCreateParamsStreaming),
        (COMPLETIONS, completion_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_real_client_is_in_the_table(path: str, params: Any) -> None:  # noqa: ANN401
    """What OpenAI's own client can send has its row: served, or refused by name."""
    listed = {name.partition(".")[0] for served in Served for name in names(served, path)}
    assert params.__required_keys__ | params.__optional_keys__ <= listed


def test_the_command_prints_the_table() -> None:
    """As it is, for a file."""
    done = CliRunner().invoke(app, ["fields", "--openai"], env={"COLUMNS": "40"})
    assert (done.exit_code, done.output) == (0, openai_fields_table() + "\n")
    for parts in FIELDS.values():
        for fields in parts.values():
            assert all(f"`{name}`" in done.output for name in fields)
