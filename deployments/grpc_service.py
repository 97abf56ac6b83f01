"""The service `drafthouse.v1.Inference` on grpc.aio, over any backend that continues requests.

A call that ends before its answer does, by cancel, deadline or a dead client, is cancelled by
grpc.aio; that closes the backend's iterator, which ends the sequence within a step.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.errors import ConfigurationError
from cluster.metrics import GatewayMetrics
from cluster.text.stream import TextDelta
from deployments.answering import Answering, check_served
from deployments.answers import Answers
from deployments.auth import Authenticator, KeyRequired, calling_tenant
from deployments.backend import Backend
from deployments.checks import only_one_of, refuse_unknown_fields
from deployments.fair_use import FairUse
from deployments.health import HealthService
from deployments.malformed import MalformedAsInvalid
from deployments.replies import chunk, description, response
from deployments.schemas import RequestReader
from deployments.statuses import Context, statuses
from deployments.trace_context import GrpcTraceContext
from protos import inference_pb2, inference_pb2_grpc

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
LARGE_REQUEST_BYTES = 16 * 1024  # read in a thread, so that it does not hold up the others

NamesModel: TypeAlias = (
    inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest | inference_pb2.GetModelRequest
)


class InferenceService:
    """Answers the calls of inference.proto."""

    def __init__(
        self,
        backend: Backend,
        reader: RequestReader,
        metrics: GatewayMetrics,
        fair_use: FairUse | None = None,
    ) -> None:
        self._reader = reader
        self.answering = Answering(backend, reader.tokenizer, metrics, fair_use)

    @property
    def backend(self) -> Backend:
        """What the answers come from."""
        return self.answering.backend

    async def GenerateStream(  # noqa: N802 - the wire's name
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Write one chunk per delta; writing and not yielding, so that a cancel lands in here."""
        async with statuses(context), aclosing(self._deltas(message, context)) as deltas:
            async for index, delta, answers in deltas:
                await context.write(chunk(index, delta, answers))

    async def Generate(  # noqa: N802 - the wire's name
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """The stream above, collected."""
        async with statuses(context), aclosing(self._deltas(message, context)) as deltas:
            return response([answers async for _, _, answers in deltas][-1])

    async def Tokenize(  # noqa: N802 - the wire's name
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a prompt or a conversation."""
        async with self._checked(message, context):
            only_one_of(message, ("prompt", "messages"))
            token_ids = await _off_loop(message, self._reader.read_text)
            return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802 - the wire's name
        self, message: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """The text of token ids."""
        async with self._checked(message, context):
            self._reader.check_token_ids("token_ids", message.token_ids)
            text = await _off_loop(message, lambda it: self._reader.tokenizer.decode(it.token_ids))
            return inference_pb2.DetokenizeResponse(text=text)

    async def GetModel(  # noqa: N802 - the wire's name
        self, message: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        """What is served and what it can do."""
        async with self._checked(message, context):
            return description(self.backend.describe())

    @asynccontextmanager
    async def _checked(self, message: NamesModel, context: Context) -> AsyncIterator[None]:
        """The block's errors become the call's status, and so do wrong fields and models."""
        async with statuses(context):
            refuse_unknown_fields(message)
            self._reader.check_model(message.model)
            check_served(self._reader.model.name, calling_tenant())
            yield

    def _deltas(
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[tuple[int, TextDelta, Answers], None]:
        """The text deltas of all answers to a message, which is read in time."""
        return self.answering.deltas(
            lambda: _off_loop(message, self._reader.read),
            tenant=calling_tenant(),
            deadline_seconds=context.time_remaining,
        )


def build_server(
    service: InferenceService,
    *,
    host: str,
    port: int,
    max_message_bytes: int,
    authenticator: Authenticator | None = None,
    credentials: grpc.ServerCredentials | None = None,
    reflects: bool = True,
) -> tuple[aio.Server, int]:
    """A server that is bound but not started, and its port (`port` 0 takes a free one).

    Serves the service, grpc.health.v1 and, if it `reflects`, reflection; with `credentials` over
    TLS only. Call it on the event loop that will run it. Raises ConfigurationError when the port
    is taken, also by another server of ours.
    """
    server = aio.server(
        interceptors=(
            GrpcTraceContext(),
            KeyRequired(authenticator or Authenticator()),
            MalformedAsInvalid(SERVICE_NAME),
        ),
        options=(
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # On by default, and then two servers on one port share its clients in silence.
            ("grpc.so_reuseport", 0),
            # Notices a client whose machine has gone without a word.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ),
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    health = HealthService(service.backend.ready, (SERVICE_NAME,))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    if reflects:
        names = (SERVICE_NAME, health_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigurationError(f"gateway.grpc_port: cannot listen on {address}") from error


async def _off_loop(message: Any, read: Any) -> Any:  # noqa: ANN401
    """`read(message)`, in a thread when that may take long."""
    slow = isinstance(message, inference_pb2.GenerateRequest) and message.HasField("grammar")
    if slow or message.ByteSize() > LARGE_REQUEST_BYTES:
        return await asyncio.to_thread(read, message)
    return read(message)
