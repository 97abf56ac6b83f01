"""grpc.health.v1, answered from what is true at the moment of asking."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

POLL_SECONDS = 0.25


class HealthService:
    """Serves `Check`, `List` and `Watch` for the named services and for "", which is all."""

    def __init__(self, ready: Callable[[], bool], services: tuple[str, ...]) -> None:
        self._ready = ready
        self._services = ("", *services)

    async def Check(  # noqa: N802 - the wire's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: aio.ServicerContext[object, object],
    ) -> health_pb2.HealthCheckResponse:
        """SERVING or NOT_SERVING; NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return self._response()

    async def List(  # noqa: N802 - the wire's name
        self,
        request: health_pb2.HealthListRequest,
        context: aio.ServicerContext[object, object],
    ) -> health_pb2.HealthListResponse:
        """The status of every service."""
        del request, context
        return health_pb2.HealthListResponse(
            statuses=dict.fromkeys(self._services, self._response())
        )

    async def Watch(  # noqa: N802 - the wire's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: aio.ServicerContext[object, object],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and again whenever it has changed."""
        del context
        if request.service not in self._services:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            yield health_pb2.HealthCheckResponse(status=unknown)
            await asyncio.Event().wait()  # the name may be asked for, but never comes up
        last = None
        while True:
            response = self._response()
            if response != last:
                yield response
                last = response
            await asyncio.sleep(POLL_SECONDS)

    def _response(self) -> health_pb2.HealthCheckResponse:
        kind = health_pb2.HealthCheckResponse
        return kind(status=kind.SERVING if self._ready() else kind.NOT_SERVING)
