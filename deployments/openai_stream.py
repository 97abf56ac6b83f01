"""What an HTTP answer needs around it: an end when the client goes, and server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Chunk = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and awaited, when the client goes or this is.

    The request's body must have been read. Raises ClientGone.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class EventStream(Response):
    """Chunks as server-sent events. `chunks` is closed however this ends."""

    media_type = "text/event-stream"

    def __init__(self, first: Chunk, chunks: AsyncGenerator[Chunk, None]) -> None:
        # The body's length is not known, so Response's own constructor is of no use.
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or as much as the client waits for."""
        del scope
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            return

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", **start})
            await _send_part(send, event(self._first))
            async for chunk in self._chunks:
                await _send_part(send, event(chunk))
        await _send_part(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(chunk: Chunk) -> bytes:
    """One chunk as an event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
