"""The one table that turns errors into gRPC's codes, and what goes out with each."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from cluster.errors import (
    DeadlineExceeded,
    DrafthouseError,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    RequestFailed,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)

logger = logging.getLogger(__name__)

# A status travels in headers, twice and encoded, and these are small: 8 KiB are safe.
MAX_DETAILS_LENGTH = 300  # characters
MAX_FIELD_LENGTH = 100
INTERNAL_DETAILS = "internal error; the server's log says more"
DETAILS_KEY = "grpc-status-details-bin"

STATUS: dict[type[BaseException], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    BaseException: grpc.StatusCode.INTERNAL,  # all others: a fault of ours, and no one's business
}

Context: TypeAlias = aio.ServicerContext[Any, Any]


@asynccontextmanager
async def statuses(context: Context) -> AsyncIterator[None]:
    """Turn what is raised inside into the call's status. Nothing of our insides gets out."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - every one has a code
        await abort(context, error)


async def abort(context: Context, error: Exception) -> NoReturn:
    """End the call with the error's status, and when to try again if that is known."""
    code, details = public(error)
    metadata: list[tuple[str, str | bytes]] = []
    status = status_pb2.Status(code=code.value[0], message=details)
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field[:MAX_FIELD_LENGTH]
        )
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if (seconds := retry_seconds(error)) is not None:
        milliseconds = max(1, round(seconds * 1000))
        delay = Duration()
        delay.FromMilliseconds(milliseconds)
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
        metadata.append(("grpc-retry-pushback-ms", str(milliseconds)))
    if status.details:
        metadata.append((DETAILS_KEY, status.SerializeToString()))
    await context.abort(code, details, tuple(metadata))


def public(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The code, and what the caller may know of the error."""
    code = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, RequestFailed):
        logger.error("a call failed", exc_info=error)
        return code, INTERNAL_DETAILS
    return code, str(error)[:MAX_DETAILS_LENGTH]


def retry_seconds(error: BaseException) -> float | None:
    """When asking again may be worth it; None where it is not, or nobody knows."""
    return error.retry_seconds if isinstance(error, DrafthouseError) else None


def _attach(status: status_pb2.Status, detail: Message) -> None:
    status.details.add().Pack(detail)
