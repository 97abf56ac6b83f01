"""What the gateway answers over HTTP: OpenAI's API, whether it serves, and what it has counted."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cluster.errors import Unauthenticated
from deployments.auth import Authenticator
from deployments.openai_errors import error_response
from deployments.openai_service import OpenAIService, tenant_of
from deployments.trace_context import HttpTraceContext


def build_http_app(
    ready: Callable[[], bool],
    metrics_page: Callable[[], Awaitable[bytes]],
    openai: OpenAIService,
    metrics_for: Authenticator,
) -> FastAPI:
    """The HTTP routes; `ready` is what grpc.health.v1 answers from, too.

    Metrics are shown to whoever `metrics_for` knows.
    """
    app = FastAPI(title="Drafthouse", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpTraceContext)
    openai.add_to(app)

    @app.get("/health")
    async def health() -> Response:
        if ready():
            return Response("SERVING\n", media_type="text/plain")
        return Response("NOT_SERVING\n", status_code=503, media_type="text/plain")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        try:
            tenant_of(request, metrics_for)
        except Unauthenticated as error:
            return error_response(error)
        return Response(await metrics_page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return app
