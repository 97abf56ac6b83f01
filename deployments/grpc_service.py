"""The service `drafthouse.v1.Inference` on grpc.aio, over any backend that continues requests.

A call that ends before its answer does, by cancel, deadline or a dead client, is cancelled by
grpc.aio; that closes the backend's iterator, which ends the sequence within a step.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, TypeAlias

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.errors import (
    ConfigurationError,
    DrafthouseError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnknownModel,
)
from cluster.messages import ModelInfo, TokenDelta
from cluster.metrics import GatewayMetrics
from cluster.request import FinishReason, Request
from cluster.text.answer import Answer
from cluster.text.stream import TextDelta, TextStream, stream_text
from deployments.account import Account
from deployments.health import HealthService
from deployments.malformed import MalformedAsInvalid
from deployments.schemas import (
    REFUSED_FIELDS,
    SERVED_FIELDS,
    RequestReader,
    only_one_of,
    refuse_unknown_fields,
)
from protos import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
LARGE_REQUEST_BYTES = 16 * 1024  # tokenised in a thread, so that it does not hold up the others
MAX_DETAILS_LENGTH = 500  # characters; a status travels in a header, and a header is small

STATUS: dict[type[BaseException], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    BaseException: grpc.StatusCode.INTERNAL,  # all others: a fault of ours, and no one's business
}
RETRY_MILLISECONDS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: 500,
    grpc.StatusCode.UNAVAILABLE: 1000,
}
FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}

Context: TypeAlias = aio.ServicerContext[Any, Any]


class Backend(Protocol):
    """What continues requests: an engine in this process, or a pool of them."""

    def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """The request's deltas; the last has a finish reason.

        An async generator: closing it aborts the request, and returns without waiting for the
        engine. Raises the errors of cluster.errors, at the call or at the first delta.
        """
        ...

    def ready(self) -> bool:
        """Whether a request would be taken now."""
        ...

    def describe(self) -> ModelInfo:
        """What is served."""
        ...


class InferenceService:
    """Answers the calls of inference.proto."""

    def __init__(self, backend: Backend, reader: RequestReader, metrics: GatewayMetrics) -> None:
        self._backend = backend
        self._reader = reader
        self._metrics = metrics

    @property
    def backend(self) -> Backend:
        """What the answers come from."""
        return self._backend

    async def GenerateStream(  # noqa: N802 - the wire's name
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Write one chunk per delta; writing and not yielding, so that a cancel lands in here."""
        async with _statuses(context), aclosing(self._answers(message)) as answers:
            async for delta, answer in answers:
                await context.write(_chunk(delta, answer))

    async def Generate(  # noqa: N802 - the wire's name
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """The stream above, collected."""
        async with _statuses(context), aclosing(self._answers(message)) as answers:
            answer = [answer async for _, answer in answers][-1]
            return inference_pb2.GenerateResponse(
                text=answer.text,
                token_ids=answer.token_ids,
                logprobs=answer.logprobs,
                **_account(answer),
            )

    async def Tokenize(  # noqa: N802 - the wire's name
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a prompt or a conversation."""
        async with _statuses(context):
            refuse_unknown_fields(message)
            self._reader.check_model(message.model)
            only_one_of(message, ("prompt", "messages"))
            token_ids = await _off_loop(message, self._reader.read_text)
            return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802 - the wire's name
        self, message: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """The text of token ids."""
        async with _statuses(context):
            refuse_unknown_fields(message)
            self._reader.check_model(message.model)
            self._reader.check_vocabulary("token_ids", message.token_ids)
            text = await _off_loop(message, lambda it: self._reader.tokenizer.decode(it.token_ids))
            return inference_pb2.DetokenizeResponse(text=text)

    async def GetModel(  # noqa: N802 - the wire's name
        self, message: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        """What is served and what it can do."""
        async with _statuses(context):
            refuse_unknown_fields(message)
            self._reader.check_model(message.model)
            return _describe(self._backend.describe())

    async def _answers(
        self, message: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[tuple[TextDelta, Answer], None]:
        """Each text delta with the answer up to it, both counted. Raises DrafthouseError."""
        with Account(self._metrics) as account:
            request = await _off_loop(message, self._reader.read)
            if not self._backend.ready():
                raise Unavailable("no target is ready yet")
            logger.debug("request %s begins", request.request_id)
            num_prompt_tokens = len(request.prompt_token_ids)
            answer = Answer(num_prompt_tokens=num_prompt_tokens, seed=request.sampling.seed)
            stream = TextStream(self._reader.tokenizer.vocabulary, request.stopping)
            async with aclosing(stream_text(self._backend.generate(request), stream)) as deltas:
                async for delta in deltas:
                    _check_end(request, delta)
                    answer.add(delta)
                    account.deliver(delta, num_prompt_tokens=num_prompt_tokens)
                    yield delta, answer


def build_server(
    service: InferenceService, *, host: str, port: int, max_message_bytes: int
) -> tuple[aio.Server, int]:
    """A server that is bound but not started, and its port (`port` 0 takes a free one).

    Serves the service, grpc.health.v1 and reflection. Call it on the event loop that will run
    it. Raises ConfigurationError when the port is taken, also by another server of ours.
    """
    server = aio.server(
        interceptors=(MalformedAsInvalid(SERVICE_NAME),),
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
    reflection.enable_server_reflection(
        (SERVICE_NAME, health_name, reflection.SERVICE_NAME), server
    )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server, server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(f"gateway.grpc_port: cannot listen on {address}") from error


@asynccontextmanager
async def _statuses(context: Context) -> AsyncIterator[None]:
    """Turn what is raised inside into the call's status. Nothing of our insides gets out."""
    try:
        yield
    except Exception as error:
        code = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
        details = str(error)
        if code is grpc.StatusCode.INTERNAL:
            logger.exception("a call failed", exc_info=error)
            details = "internal error; the server's log says more"
        hint = RETRY_MILLISECONDS.get(code)
        await context.abort(
            code,
            details[:MAX_DETAILS_LENGTH],
            () if hint is None else (("grpc-retry-pushback-ms", str(hint)),),
        )


def _check_end(request: Request, delta: TextDelta) -> None:
    """Raises when the sequence ended without its answer."""
    if delta.finish_reason is FinishReason.ERROR:
        raise DrafthouseError(f"request {request.request_id} failed: {delta.error}")
    if delta.finish_reason is FinishReason.ABORT:
        raise Unavailable("the server ended the request; it may be sent again")


async def _off_loop(message: Any, read: Any) -> Any:  # noqa: ANN401
    """`read(message)`, in a thread when the message is large."""
    if message.ByteSize() > LARGE_REQUEST_BYTES:
        return await asyncio.to_thread(read, message)
    return read(message)


def _chunk(delta: TextDelta, answer: Answer) -> inference_pb2.GenerateChunk:
    return inference_pb2.GenerateChunk(
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        num_accepted=delta.num_accepted,
        **({} if delta.finish_reason is None else _account(answer)),
    )


def _account(answer: Answer) -> dict[str, Any]:
    """The fields that tell how an answer ended and came about."""
    num_tokens = len(answer.token_ids)
    assert answer.finish_reason is not None
    return {
        "finish_reason": FINISH_REASONS[answer.finish_reason],
        "usage": inference_pb2.Usage(
            prompt_tokens=answer.num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=answer.num_prompt_tokens + num_tokens,
        ),
        "seed": answer.seed,
        "speculation": inference_pb2.SpeculationStats(
            steps=answer.num_steps, drafted=answer.num_drafted, accepted=answer.num_accepted
        ),
    }


def _describe(model: ModelInfo) -> inference_pb2.GetModelResponse:
    field = inference_pb2.Field
    exact = [field(name=name, support=field.SUPPORT_EXACT) for name in SERVED_FIELDS]
    refused = [field(name=name, support=field.SUPPORT_REFUSED) for name in REFUSED_FIELDS]
    return inference_pb2.GetModelResponse(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        drafters=model.drafters,
        bit_exact=not model.variant_operations,
        variant_operations=model.variant_operations,
        fields=exact + refused,
    )
