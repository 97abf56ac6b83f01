"""The gateway: where clients knock. Its own gRPC server, and HTTP for health and metrics."""

import asyncio
import json
import logging
import uuid
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.actors.membership import MemberKind, Snapshot
from cluster.actors.pool import EnginePool
from cluster.config import DrafthouseConfig
from cluster.messages import ModelInfo
from cluster.metrics import Family, GatewayMetrics, collect
from cluster.models.reference import load_generation_defaults, resolve
from cluster.text.tokenizer import load_tokenizer
from deployments.grpc_service import InferenceService, build_server
from deployments.http_service import build_http_app
from deployments.metrics import MetricsPage
from deployments.schemas import RequestReader
from deployments.supervision import follow, yield_to_compute

logger = logging.getLogger(__name__)


class Gateway:
    """Complete once its gRPC server listens; `ready` once a target has generated a token.

    `target` is bound here so that gateways are shut down before the targets they use.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits the constructor
        self, config: DrafthouseConfig, target: DeploymentHandle, router: DeploymentHandle
    ) -> None:
        del target
        yield_to_compute()
        self._gateway_id = f"gateway-{uuid.uuid4().hex[:12]}"
        self._drain_seconds = config.gateway.drain_seconds
        self._registry = CollectorRegistry()
        self._snapshot = Snapshot()
        folder = await asyncio.to_thread(resolve, config.target.model)
        configured = _configured(config, folder)
        self._pool = EnginePool(self._gateway_id, configured)
        reader = RequestReader(
            configured,
            await asyncio.to_thread(load_tokenizer, folder),
            load_generation_defaults(folder),
        )
        metrics = GatewayMetrics(self._registry, model=config.name)
        self._server, self._port = build_server(
            InferenceService(self._pool, reader, metrics),
            host=config.gateway.host,
            port=config.gateway.grpc_port,
            max_message_bytes=config.gateway.max_message_bytes,
        )
        context = serve.get_replica_context()
        self._page = MetricsPage(
            snapshot=lambda: self._snapshot,
            router=router,
            gateways=serve.get_deployment_handle(context.deployment, context.app_name),
        )
        await self._server.start()
        self._following = asyncio.create_task(
            follow(router, member=lambda: None, on_snapshot=self._on_snapshot)
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Serve's HTTP proxy is answered with."""
        return build_http_app(self._pool.ready, self._page)

    async def metrics(self) -> tuple[str, tuple[Family, ...]]:
        """The id and everything this gateway has counted."""
        return self._gateway_id, collect(self._registry)

    async def grpc_port(self) -> int:
        """The port the gRPC server listens on."""
        return self._port

    async def ready(self) -> bool:
        """Whether requests are taken."""
        return self._pool.ready()

    async def __del__(self) -> None:
        """Take no new requests, let the streams under way end, then let go of the engines."""
        await self._server.stop(grace=self._drain_seconds)
        self._following.cancel()
        self._pool.close()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._pool.set_engines(snapshot.of_kind(MemberKind.TARGET))


def _configured(config: DrafthouseConfig, folder: Path) -> ModelInfo:
    """The model as far as files tell: what is true before any engine has answered."""
    return ModelInfo(
        name=config.name,
        max_model_len=config.target.max_model_len,
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
        drafters=(),
    )
