"""The gateway: where clients knock. Its own gRPC server, and HTTP for health and metrics."""

import asyncio
import json
import logging
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.actors.membership import MemberKind, Snapshot
from cluster.actors.pool import EnginePool
from cluster.config import DrafthouseConfig
from cluster.garbage import freeze_loaded
from cluster.logs import setup_logging
from cluster.messages import ModelInfo
from cluster.metrics import Family, GatewayMetrics, collect
from cluster.models.reference import load_generation_defaults, resolve
from cluster.text.tokenizer import load_tokenizer
from deployments.auth import Authenticator
from deployments.autoscaling import OPEN_STREAMS
from deployments.entrance import Entrance
from deployments.grpc_service import InferenceService, build_server
from deployments.http_service import build_http_app
from deployments.metrics import MetricsPage
from deployments.observed import observed
from deployments.openai_service import OpenAIService
from deployments.schemas import RequestReader
from deployments.supervision import follow

logger = logging.getLogger(__name__)


class Gateway:
    """Complete once its gRPC server listens; `ready` once a target has generated a token.

    `target` is bound here so that gateways are shut down before the targets they use.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits the constructor
        self, config: DrafthouseConfig, target: DeploymentHandle, router: DeploymentHandle
    ) -> None:
        del target
        self._gateway_id = f"gateway-{uuid.uuid4().hex[:12]}"
        setup_logging(self._gateway_id, config.observability)
        self._drain_seconds = config.gateway.drain_seconds
        self._registry = CollectorRegistry()
        metrics = GatewayMetrics(self._registry, model=config.name)
        self._entrance = Entrance(config.gateway, metrics)
        self._snapshot = Snapshot()
        folder = await asyncio.to_thread(resolve, config.target.model)
        configured = _configured(config, folder)
        self._pool = EnginePool(self._gateway_id, configured, on_move=metrics.failed_over)
        self._closing = AsyncExitStack()
        backend = observed(
            self._pool,
            config,
            metrics,
            instance=self._gateway_id,
            lowest_load=self._pool.lowest_load,
            closing=self._closing,
        )
        reader = RequestReader(
            configured,
            await asyncio.to_thread(load_tokenizer, folder),
            load_generation_defaults(folder),
        )
        service = InferenceService(backend, reader, metrics, self._entrance.fair_use)
        needs_key = config.gateway.metrics_need_key
        self._metrics_for = self._entrance.authenticator if needs_key else Authenticator()
        self._openai = OpenAIService(
            service.answering,
            reader,
            self._entrance.authenticator,
            max_body_bytes=config.gateway.max_message_bytes,
        )
        self._server, self._port = build_server(
            service,
            host=config.gateway.host,
            port=config.gateway.grpc_port,
            max_message_bytes=config.gateway.max_message_bytes,
            authenticator=self._entrance.authenticator,
            credentials=self._entrance.credentials,
            reflects=config.gateway.reflects,
        )
        context = serve.get_replica_context()
        self._page = MetricsPage(
            snapshot=lambda: self._snapshot,
            router=router,
            gateways=serve.get_deployment_handle(context.deployment, context.app_name),
        )
        freeze_loaded()
        await self._server.start()
        self._following = asyncio.create_task(
            follow(router, member=lambda: None, on_snapshot=self._on_snapshot)
        )
        self._watching = asyncio.create_task(self._entrance.watch())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Serve's HTTP proxy is answered with."""
        return build_http_app(self._pool.ready, self._page.get, self._openai, self._metrics_for)

    async def metrics(self) -> tuple[str, tuple[Family, ...]]:
        """The id and everything this gateway has counted."""
        return self._gateway_id, collect(self._registry)

    async def grpc_port(self) -> int:
        """The port the gRPC server listens on."""
        return self._port

    async def ready(self) -> bool:
        """Whether requests are taken."""
        return self._pool.ready()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of gateways goes by."""
        return {OPEN_STREAMS: float(self._pool.num_under_way)}

    async def __del__(self) -> None:
        """Take no new requests, let the streams under way end, then let go of the engines."""
        await self._server.stop(grace=self._drain_seconds)
        self._following.cancel()
        self._watching.cancel()
        await self._closing.aclose()
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
        verification=config.speculation.verification,
    )
