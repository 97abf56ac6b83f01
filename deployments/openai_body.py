"""From the bytes of an HTTP body to one of the models of openai_schemas, or a typed error."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from cluster.errors import DrafthouseError, InvalidRequest
from cluster.tools.openai_fields import is_refused
from deployments.openai_schemas import Body

T = TypeVar("T", bound=Body)
MAX_DEPTH = 100  # of lists and objects in each other
MAX_NAME_LENGTH = 200  # of a field's path in an error


class BodyTooLarge(DrafthouseError):
    """The body is longer than what is read at all."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is over the limit of {limit} bytes")
        self.limit = limit

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.limit,)


async def read_body(pieces: AsyncIterator[bytes], *, length: str | None, limit: int) -> bytes:
    """All pieces together. Raises BodyTooLarge before more than `limit` bytes are held.

    `length` is what the caller said it would be.
    """
    if length is not None and length.isdecimal() and int(length[:20]) > limit:
        raise BodyTooLarge(limit)
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > limit:
            raise BodyTooLarge(limit)
    return bytes(body)


def parse_body(kind: type[T], body: bytes) -> T:
    """The body as `kind`. Raises InvalidRequest naming the field by its path."""
    data = _parse_json(body)
    if not isinstance(data, dict):
        raise InvalidRequest("body", "is not a JSON object")
    given = {name: value for name, value in data.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        _refuse(error, given)


def _parse_json(body: bytes) -> Any:  # noqa: ANN401 - any JSON
    try:
        text = body.decode()
        data = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
        if r"\u" in text:  # an escape may be half a character
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except UnicodeError:
        raise InvalidRequest("body", "is not Unicode text") from None
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from error
    if _is_deeper(data, MAX_DEPTH):
        raise InvalidRequest("body", f"is nested deeper than {MAX_DEPTH}")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ; of two values for one name neither is ignored."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequest(name[:MAX_NAME_LENGTH], "is given twice")
        found[name] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _is_deeper(data: Any, limit: int) -> bool:  # noqa: ANN401 - any JSON
    level: list[Any] = [[data]]
    for _ in range(limit + 1):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse(error: ValidationError, data: Mapping[str, Any]) -> NoReturn:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a value that may have several types, the one that was understood furthest.
    problem = max(problems, key=lambda item: len(_path(item["loc"], data)))
    field = _written(_path(problem["loc"], data))
    if problem["type"] == "extra_forbidden":
        known = is_refused(field)
        raise InvalidRequest(field, "is not served" if known else "is not known here") from error
    raise InvalidRequest(field, problem["msg"]) from error


def _path(location: tuple[int | str, ...], data: Any) -> list[int | str]:  # noqa: ANN401 - JSON
    """A location without the names of the types that were tried on the way."""
    path: list[int | str] = []
    for place, part in enumerate(location):
        is_last = place == len(location) - 1
        if isinstance(data, dict) and (part in data or is_last):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        path.append(part)
    return path


def _written(path: list[int | str]) -> str:
    """As fields are named everywhere: `messages[0].role`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")[:MAX_NAME_LENGTH] or "body"
