"""The caller's trace, as its call brought it: W3C `traceparent` in gRPC metadata or HTTP headers.

Needs no tracing library: what nobody reads costs nothing.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import grpc
from grpc import aio

HEADERS = ("traceparent", "tracestate")

NO_TRACE: Mapping[str, str] = MappingProxyType({})

current_trace: ContextVar[Mapping[str, str]] = ContextVar("current_trace", default=NO_TRACE)
"""The trace headers of the call that the running task answers."""


class GrpcTraceContext(aio.ServerInterceptor):
    """Keeps the trace headers of each gRPC call for whoever answers it."""

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - grpc's handlers have no usable type
        """The call's own handler; it runs in this very task."""
        keep_trace((str(key), value) for key, value in handler_call_details.invocation_metadata)
        return await continuation(handler_call_details)


class HttpTraceContext:
    """ASGI middleware that keeps the trace headers of each HTTP request."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: object, send: object) -> None:
        """Pass the request on, in a context that knows its trace."""
        headers = scope.get("headers", ())
        keep_trace((key.decode("latin-1"), value.decode("latin-1")) for key, value in headers)
        await self._app(scope, receive, send)


def keep_trace(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """Note what the call says of its trace, for the rest of this task."""
    kept = {key: value for key, value in headers if key in HEADERS and isinstance(value, str)}
    current_trace.set(kept)
