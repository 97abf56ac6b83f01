"""What the gateway answers over HTTP: whether it serves, and what everyone has counted."""

from collections.abc import Callable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from deployments.metrics import MetricsPage


def build_http_app(ready: Callable[[], bool], page: MetricsPage) -> FastAPI:
    """The HTTP routes; `ready` is what grpc.health.v1 answers from, too."""
    app = FastAPI(title="Drafthouse", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        if ready():
            return Response("SERVING\n", media_type="text/plain")
        return Response("NOT_SERVING\n", status_code=503, media_type="text/plain")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await page.get(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return app
