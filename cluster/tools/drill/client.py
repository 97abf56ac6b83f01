"""A client as a client library would be: it knows several gateways, and comes again when one goes.

A connection that breaks and a refusal are told apart by what the server itself sent along.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from cluster.tools.drill.questions import Question
from protos import inference_pb2, inference_pb2_grpc

RETRY_KEY = "grpc-retry-pushback-ms"
LOOK_UP_SECONDS = 1.0
AVOID_SECONDS = 5.0  # after a connection to a gateway broke
PATIENCE_SECONDS = 15.0  # without a message: the gateway is taken for gone


class Disconnected(Exception):
    """The connection broke, or brought nothing for too long: another gateway has to go on."""


class Refused(Exception):
    """The server said so itself: not now."""

    def __init__(self, code: str, details: str, *, retry_seconds: float) -> None:
        super().__init__(f"{code}: {details}")
        self.retry_seconds = retry_seconds


class Failed(Exception):
    """The server ended the call with an error."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message brought."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass
class Gateways:
    """The gateways there are, and a channel to each. `look_up` says where they listen now."""

    look_up: Callable[[], Awaitable[tuple[str, ...]]]
    patience_seconds: float = PATIENCE_SECONDS
    _channels: dict[str, aio.Channel] = field(default_factory=dict)
    _known: tuple[str, ...] = ()
    _found: asyncio.Event = field(default_factory=asyncio.Event)
    _avoided: dict[str, float] = field(default_factory=dict)
    _turns: "itertools.count[int]" = field(default_factory=itertools.count)

    async def follow(self) -> None:
        """Keep knowing them. Never ends by itself."""
        while True:
            self.know(await self.look_up())
            for address in self._channels.keys() - set(self._known):
                await self._channels.pop(address).close()
            await asyncio.sleep(LOOK_UP_SECONDS)

    def know(self, addresses: tuple[str, ...]) -> None:
        """Use these from now on; none is no news."""
        if addresses:
            self._known = addresses
            self._found.set()

    async def close(self) -> None:
        """Let go of all."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def ask(self, question: Question) -> AsyncGenerator[Piece, None]:
        """The answer's pieces, from one gateway. Raises Disconnected, Refused and Failed."""
        async with aclosing(self.stream(message_of(question))) as pieces:
            async for piece in pieces:
                yield piece

    async def stream(
        self, message: inference_pb2.GenerateRequest, *, deadline_seconds: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The answer's pieces. Raises as `ask`."""
        address = await self._choose()
        call = self.stub(address).GenerateStream(message, timeout=deadline_seconds)
        try:
            async for chunk in self._in_time(call):
                yield Piece(tuple(chunk.token_ids), tuple(chunk.logprobs))
        except (aio.AioRpcError, asyncio.CancelledError, TimeoutError) as error:
            if isinstance(error, asyncio.CancelledError) and _task_is_cancelled():
                raise
            told = read_error(error)
            if isinstance(told, Disconnected):
                self._avoided[address] = time.monotonic() + AVOID_SECONDS
            raise told from error

    def stub(self, address: str) -> Any:  # noqa: ANN401 - generated code has no types
        """A stub on the gateway's channel."""
        if address not in self._channels:
            self._channels[address] = aio.insecure_channel(address)
        return inference_pb2_grpc.InferenceStub(self._channels[address])

    async def _in_time(self, call: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - as above
        """The call's messages; a call that brings none for too long is given up."""
        messages = aiter(call)
        try:
            while True:
                async with asyncio.timeout(self.patience_seconds):
                    try:
                        message = await anext(messages)
                    except StopAsyncIteration:
                        return
                yield message
        finally:
            call.cancel()

    async def _choose(self) -> str:
        """One after the other, those that broke a moment ago last."""
        await self._found.wait()
        now = time.monotonic()
        good = [name for name in self._known if self._avoided.get(name, 0.0) < now]
        candidates = good or self._known
        return candidates[next(self._turns) % len(candidates)]


def read_error(error: BaseException) -> Disconnected | Refused | Failed:
    """What a call's end means to the caller."""
    if not isinstance(error, aio.AioRpcError):
        return Disconnected(repr(error))
    metadata = dict(error.trailing_metadata() or ())
    code, details = error.code(), error.details() or ""
    if RETRY_KEY in metadata:
        seconds = float(metadata[RETRY_KEY]) / 1000
        return Refused(code.name, details, retry_seconds=seconds)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Disconnected(details)
    return Failed(code.name, details)


def _task_is_cancelled() -> bool:
    """Whether somebody wants this task to end; a channel that closes cancels calls, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def message_of(question: Question) -> inference_pb2.GenerateRequest:
    """The request as it goes over the wire."""
    return inference_pb2.GenerateRequest(
        token_ids=question.prompt_token_ids,
        sampling=inference_pb2.Sampling(temperature=question.temperature, seed=question.seed),
        stopping=inference_pb2.Stopping(max_tokens=question.max_tokens, ignore_eos=True),
        logprobs=True,
    )
