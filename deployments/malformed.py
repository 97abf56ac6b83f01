"""Requests that are no protobuf at all, answered as what they are: bad input."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio


class MalformedAsInvalid(aio.ServerInterceptor):
    """Without it grpc.aio answers UNKNOWN, with the exception's text, and logs a stack each time.

    Covers one service, whose handlers all take one request and are coroutines.
    """

    def __init__(self, service_name: str) -> None:
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - grpc's handlers have no usable type
        """The same handler, whose decoder hands errors on instead of raising them."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        decode = handler.request_deserializer
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        answer = getattr(handler, kind)

        def decode_or_error(data: bytes) -> Any:  # noqa: ANN401 - whatever the method takes
            try:
                return decode(data)
            except DecodeError as error:
                return error

        async def answer_or_refuse(message: Any, context: Any) -> Any:  # noqa: ANN401 - as above
            if isinstance(message, DecodeError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"request: {message}")
            return await answer(message, context)

        return handler._replace(request_deserializer=decode_or_error, **{kind: answer_or_refuse})
