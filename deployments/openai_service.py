"""OpenAI's HTTP API: chat completions, completions and models.

Bodies become messages of inference.proto and go the way of every call: read, admitted, answered,
counted. Speaks HTTP only; who may ask is decided where gRPC's calls are.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import cluster.request
from cluster.errors import InvalidRequest
from cluster.tenant import Tenant
from cluster.text.stream import TextDelta
from deployments.answering import Answering, check_served
from deployments.answers import Answers
from deployments.auth import Authenticator
from deployments.openai_body import parse_body, read_body
from deployments.openai_errors import (
    answer_exception,
    answer_http_exception,
    error_body,
    error_response,
)
from deployments.openai_pacing import paced
from deployments.openai_reader import Asked, OpenAIReader
from deployments.openai_replies import Call, ChatWriter, CompletionWriter, Writer
from deployments.openai_schemas import ChatRequest, CompletionRequest
from deployments.openai_stream import Chunk, ClientGone, EventStream, while_connected
from deployments.schemas import RequestReader

P = TypeVar("P")
R = TypeVar("R")
Deltas: TypeAlias = AsyncGenerator[tuple[int, TextDelta, Answers], None]

LARGE_BODY_BYTES = 16 * 1024  # read in a thread, so that it does not hold up the others
CLIENT_GONE_STATUS = 499  # nobody reads it


class OpenAIService:
    """Answers the routes under /v1."""

    def __init__(
        self,
        answering: Answering,
        reader: RequestReader,
        authenticator: Authenticator,
        *,
        max_body_bytes: int,
    ) -> None:
        self._answering = answering
        self._reader = reader
        self._openai = OpenAIReader(reader)
        self._authenticator = authenticator
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Give the application these routes, and errors in their shape."""
        app.post("/v1/chat/completions")(self.chat_completions)
        app.post("/v1/completions")(self.completions)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{model:path}")(self.model)
        app.exception_handler(HTTPException)(answer_http_exception)
        app.exception_handler(Exception)(answer_exception)

    async def chat_completions(self, request: Request) -> Response:
        """The next turn of a conversation."""
        return await self._answer(request, self._read_chat, ChatWriter)

    async def completions(self, request: Request) -> Response:
        """What follows a text."""
        return await self._answer(request, self._read_completion, CompletionWriter)

    async def models(self, request: Request) -> Response:
        """What is served to whoever asks."""
        try:
            tenant = tenant_of(request, self._authenticator)
        except Exception as error:  # noqa: BLE001 - every one has a status
            return error_response(error)
        data = [self._model()] if tenant.may_ask(self._reader.model.name) else []
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request, model: str) -> Response:
        """One of them."""
        try:
            check_served(self._reader.model.name, tenant_of(request, self._authenticator))
            self._reader.check_model(model)
        except Exception as error:  # noqa: BLE001 - every one has a status
            return error_response(error)
        return JSONResponse(self._model())

    async def _answer(
        self, request: Request, read: Callable[[bytes], Asked], writer: Callable[[Call], Writer]
    ) -> Response:
        """The whole answer, or its stream once there is something in it; else the error."""
        try:
            tenant = tenant_of(request, self._authenticator)
            body = await read_body(
                request.stream(),
                length=request.headers.get("content-length"),
                limit=self._max_body_bytes,
            )
            work = self._begin(_Body(body, read, self._reader), tenant, writer)
            return await while_connected(request.receive, work)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_GONE_STATUS)
        except Exception as error:  # noqa: BLE001 - every one has a status
            return error_response(error)

    async def _begin(
        self, body: "_Body", tenant: Tenant, writer: Callable[[Call], Writer]
    ) -> Response:
        deltas = _renamed(self._answering.deltas(body.read, tenant=tenant), body)
        first = await anext(deltas)
        answers = first[2]
        asked = body.asked()
        call = Call(
            asked=asked,
            requests=body.requests,
            model=self._reader.model.name,
            tokenizer=self._reader.tokenizer,
        )
        if asked.stream:
            chunks = _chunks(_after(first, deltas), writer(call), answers)
            return EventStream(await anext(chunks), chunks)
        async with aclosing(deltas):
            async for _ in deltas:
                pass
        return JSONResponse(writer(call).whole(answers))

    def _read_chat(self, body: bytes) -> Asked:
        return self._openai.chat(parse_body(ChatRequest, body))

    def _read_completion(self, body: bytes) -> Asked:
        return self._openai.completion(parse_body(CompletionRequest, body))

    def _model(self) -> dict[str, Any]:
        described = self._answering.backend.describe()
        return {
            "id": described.name,
            "object": "model",
            "created": self._created,
            "owned_by": "drafthouse",
            "max_model_len": described.max_model_len,
            "bit_exact": not described.variant_operations,
        }


def tenant_of(request: Request, authenticator: Authenticator) -> Tenant:
    """Whose request it is, by its one `Authorization` header. Raises Unauthenticated."""
    shown = request.headers.getlist("authorization")
    return authenticator.tenant_of(shown[0] if len(shown) == 1 else None)


class _Body:
    """A body that is read when its call is: what it asks for is known from then on."""

    def __init__(self, body: bytes, read: Callable[[bytes], Asked], reader: RequestReader) -> None:
        self._body = body
        self._read = read
        self._reader = reader
        self._asked: Asked | None = None
        self.requests: tuple[cluster.request.Request, ...] = ()

    async def read(self) -> tuple[cluster.request.Request, ...]:
        """One for each answer. Raises InvalidRequest and UnknownModel."""
        is_large = len(self._body) > LARGE_BODY_BYTES
        self._asked = asked = await _called(self._read, self._body, in_thread=is_large)
        is_slow = is_large or asked.message.HasField("grammar")
        self.requests = await _called(self._reader.read, asked.message, in_thread=is_slow)
        return self.requests

    def asked(self) -> Asked:
        """What was read."""
        assert self._asked is not None
        return self._asked

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The same error in words of this API, if the body was understood so far."""
        return error if self._asked is None else self._asked.renamed(error)


async def _called(function: Callable[[P], R], argument: P, *, in_thread: bool) -> R:
    return await asyncio.to_thread(function, argument) if in_thread else function(argument)


async def _renamed(deltas: Deltas, body: _Body) -> Deltas:
    """The same; what is said of a field is said in words of this API."""
    try:
        async with aclosing(deltas):
            async for item in deltas:
                yield item
    except InvalidRequest as error:
        raise body.renamed(error) from error


async def _after(first: tuple[int, TextDelta, Answers], deltas: Deltas) -> Deltas:
    async with aclosing(deltas):
        yield first
        async for item in deltas:
            yield item


async def _chunks(deltas: Deltas, writer: Writer, answers: Answers) -> AsyncGenerator[Chunk, None]:
    """All chunks of a stream; an error, when it has begun, is one of them."""
    try:
        async with aclosing(paced(deltas)) as pieces:
            async for index, delta in pieces:
                for chunk in writer.chunks(index, delta):
                    yield chunk
        for chunk in writer.closing(answers):
            yield chunk
    except Exception as error:  # noqa: BLE001 - every one can be told
        yield error_body(error)
