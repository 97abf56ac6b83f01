"""Who is calling: the one place where that is decided, for gRPC and for HTTP."""

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc
from grpc import aio

from cluster.errors import Unauthenticated
from cluster.tenant import ANYONE, Tenant
from deployments.keys import KeyRing
from deployments.statuses import Context, abort

OPEN_PREFIXES = ("/grpc.health.v1.Health/",)
SCHEME = "bearer"
MAX_KEY_LENGTH = 256

_tenant: ContextVar[Tenant] = ContextVar("tenant", default=ANYONE)


def calling_tenant() -> Tenant:
    """Whose gRPC call this task answers."""
    return _tenant.get()


class Authenticator:
    """Turns what a caller shows into a tenant. Without keys everyone is `ANYONE`.

    `refused` hears why each caller that is turned away was.
    """

    def __init__(
        self, keys: KeyRing | None = None, *, refused: Callable[[str], None] = lambda _: None
    ) -> None:
        self._keys = keys
        self._refused = refused

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization: Bearer KEY` header. Raises Unauthenticated."""
        try:
            return self._tenant_of(authorization)
        except Unauthenticated as error:
            self._refused(error.reason)
            raise

    def _tenant_of(self, authorization: str | None) -> Tenant:
        if self._keys is None:
            return ANYONE
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != SCHEME or not key:
            raise Unauthenticated("missing")
        if len(key) > MAX_KEY_LENGTH:
            raise Unauthenticated("unknown")
        return self._keys.tenant_of(key)


class KeyRequired(aio.ServerInterceptor):
    """Lets calls through whose `authorization` metadata is a valid key, and says whose they are.

    Others are answered UNAUTHENTICATED before their request is read. Health stays open.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - grpc's handlers have no usable type
        """The method's handler, or one of its kind that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_PREFIXES):
            return handler
        try:
            shown = _authorization(handler_call_details.invocation_metadata)
            _tenant.set(self._authenticator.tenant_of(shown))
        except Unauthenticated as error:
            return _refusing(handler, error)
        return handler


def _authorization(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    """The one header of that name; several are as good as none."""
    values = [value for name, value in metadata if name == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _refusing(handler: Any, error: Unauthenticated) -> Any:  # noqa: ANN401 - as above
    """A handler with as many requests and answers as the one it stands for."""

    async def refuse(request: object, context: Context) -> None:
        del request
        await abort(context, error)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)
