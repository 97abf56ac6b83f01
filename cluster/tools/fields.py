"""Every field of a request and how it is served: `drafthouse fields`, and what GetModel answers."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from protos import inference_pb2

# What other servers have and this one does not: it is not on the wire, so asking is an error.
REFUSED_FIELDS = (
    "echo",
    "lora",
    "sampling.beam_width",
    "sampling.best_of",
    "sampling.length_penalty",
    "sampling.logits_processors",
    "sampling.no_repeat_ngram_size",
    "sampling.typical_p",
    "suffix",
    "tools",
)


def field_paths(descriptor: Any) -> Iterator[str]:  # noqa: ANN401 - protobuf has two types for it
    """The dotted paths of a message's fields; a list of messages, or a map, is one field."""
    for field in descriptor.fields:
        if field.message_type is None or field.is_repeated:
            yield field.name
        else:
            yield from (f"{field.name}.{path}" for path in field_paths(field.message_type))


EXACT_FIELDS = tuple(field_paths(inference_pb2.GenerateRequest.DESCRIPTOR))


def fields_table() -> str:
    """All fields as a table in Markdown: those of each message that are exact, then the refused."""
    rows = [("served", "part of the request", "fields"), ("---", "---", "---")]
    for served, paths in (("exact", EXACT_FIELDS), ("refused", REFUSED_FIELDS)):
        for part, group in groupby(sorted(paths, key=_part), key=_part):
            names = ", ".join(f"`{path.removeprefix(f'{part}.')}`" for path in group)
            rows.append((served, f"`{part}`" if part else "itself", names))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _part(path: str) -> str:
    """The message inside the request that a field is in; empty for the request's own."""
    return path.rpartition(".")[0]
