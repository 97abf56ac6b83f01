"""The one table that turns errors into OpenAI's: an HTTP status, a type and a code."""

import math
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    RequestFailed,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from deployments.openai_body import BodyTooLarge
from deployments.statuses import INTERNAL_DETAILS, MAX_DETAILS_LENGTH, public, retry_seconds

INVALID, LIMITED, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
RETRY_SECONDS = 1.0  # where an error that may be retried does not say when


@dataclass(frozen=True, slots=True)
class Failure:
    """How an error is told."""

    status: int
    type: str
    code: str
    may_be_retried: bool = False


FAILURES: dict[type[BaseException], Failure] = {
    ContextExceeded: Failure(400, INVALID, "context_length_exceeded"),
    InvalidRequest: Failure(400, INVALID, "invalid_value"),
    BodyTooLarge: Failure(413, INVALID, "body_too_large"),
    UnknownModel: Failure(404, INVALID, "model_not_found"),
    Unauthenticated: Failure(401, "authentication_error", "invalid_api_key"),
    QuotaExceeded: Failure(429, LIMITED, "rate_limit_exceeded", may_be_retried=True),
    Overloaded: Failure(429, LIMITED, "overloaded", may_be_retried=True),
    Unavailable: Failure(503, SERVER, "unavailable", may_be_retried=True),
    DeadlineExceeded: Failure(504, SERVER, "deadline_exceeded"),
    RequestFailed: Failure(500, SERVER, "request_failed"),
    BaseException: Failure(500, SERVER, "internal_error"),
}


def failure_of(error: BaseException) -> Failure:
    """The nearest one in the table."""
    return next(FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES)


def error_body(error: BaseException) -> dict[str, Any]:
    """The error as the body of an answer, or as a chunk of one. Logs a fault of ours."""
    failure = failure_of(error)
    # The other faults are told by the table of gRPC, which says what callers may know of them.
    message = str(error) if isinstance(error, BodyTooLarge) else public(error)[1]
    field = error.field if isinstance(error, InvalidRequest) else None
    if isinstance(error, UnknownModel):
        field = "model"
    return _body(message, type_=failure.type, param=field, code=failure.code)


def error_response(error: BaseException) -> JSONResponse:
    """The whole answer, with when to try again."""
    failure = failure_of(error)
    headers = {}
    if failure.may_be_retried:
        seconds = retry_seconds(error) or RETRY_SECONDS
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=failure.status, headers=headers)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not by this method."""
    del request
    assert isinstance(error, HTTPException)
    body = _body(str(error.detail), type_=INVALID, param=None, code="not_found")
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def answer_exception(request: Request, error: Exception) -> Response:
    """A fault of ours outside the handlers."""
    del request, error
    return JSONResponse(
        _body(INTERNAL_DETAILS, type_=SERVER, param=None, code="internal_error"), status_code=500
    )


def _body(message: str, *, type_: str, param: str | None, code: str) -> dict[str, Any]:
    error = {"message": message[:MAX_DETAILS_LENGTH], "type": type_, "param": param, "code": code}
    return {"error": error}
