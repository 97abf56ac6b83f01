"""Checks of a message's fields. What does not hold is an InvalidRequest that names the field."""

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster.errors import InvalidRequest

T = TypeVar("T")


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Raises InvalidRequest for a field that a newer client knows and this server does not."""
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        problem = f"field number {unknown[0].field_number} is not known here"
        raise InvalidRequest(path or message.DESCRIPTOR.name, problem)
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if kind is None or kind.GetOptions().map_entry:  # a map's entries are plain numbers
            continue
        for part in value if descriptor.is_repeated else (value,):
            refuse_unknown_fields(part, f"{path}.{descriptor.name}".lstrip("."))


def only_one_of(message: Message, fields: Sequence[str], *, path: str = "") -> str:
    """The one of the fields that is given. Raises InvalidRequest when none or several are.

    The error names the first field that is given, or else `path`, or else the first field.
    """
    present = {descriptor.name for descriptor, _ in message.ListFields()}
    given = [field for field in fields if field in present]
    if len(given) != 1:
        names = ", ".join(fields)
        problem = f"{' and '.join(given)} are given" if given else "none is given"
        raise InvalidRequest(
            given[0] if given else path or fields[0],
            f"exactly one of {names} is needed; {problem}",
        )
    return given[0]


def optional(message: Message, field: str, default: T) -> T:
    """A field's value where it is present, else the default."""
    value: T = getattr(message, field) if message.HasField(field) else default
    return value


def check_range(field: str, value: float, *, low: float, high: float, unit: str = "") -> None:
    """Raises InvalidRequest unless low <= value <= high; NaN never is."""
    if not low <= value <= high:
        what = f"{value} {unit}".strip()
        raise InvalidRequest(field, f"{what} is not in [{low}, {high}]")


def check_above(field: str, value: float, *, low: float, high: float) -> None:
    """Raises InvalidRequest unless low < value <= high; NaN never is."""
    if not low < value <= high:
        raise InvalidRequest(field, f"{value} is not in ({low}, {high}]")


def check_count(field: str, num_values: int, limit: int) -> None:
    """Raises InvalidRequest for more values than the limit."""
    if num_values > limit:
        raise InvalidRequest(field, f"{num_values} are over the limit of {limit}")


def check_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest unless all ids are below `vocab_size`."""
    if (largest := max(token_ids, default=0)) >= vocab_size:
        problem = f"{largest} is not in the vocabulary of {vocab_size}"
        raise InvalidRequest(field, problem)
