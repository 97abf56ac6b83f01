"""Handles that behave as Ray's do towards their callers, for objects in this process."""

import asyncio
import inspect
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable

from ray.exceptions import ActorDiedError, RayTaskError

from cluster.messages import ExchangeInput, ExchangeOutput


class FakeHandle:
    """A handle to `instance`; after `kill()` whatever is asked or pends raises ActorDiedError."""

    def __init__(self, instance: object) -> None:
        self.instance = instance
        self.dead = asyncio.Event()

    def __getattr__(self, name: str) -> "FakeMethod":
        return FakeMethod(self, name)

    def kill(self) -> None:
        """The process is gone."""
        self.dead.set()


class FakeDraftWorker:
    """What engines call, by what subclasses do."""

    async def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Drafts."""
        raise NotImplementedError

    async def exchange_packed(self, packed: bytes) -> bytes:
        """As a draft worker's."""
        return pickle.dumps(await self.exchange(pickle.loads(packed)))  # noqa: S301 - the test's


class FakeMethod:
    """One method of a handle."""

    def __init__(self, handle: FakeHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def options(self, **options: object) -> "FakeMethod":
        """Whatever they are."""
        del options
        return self

    def remote(self, *args: object, **kwargs: object) -> object:
        """Start the call; what comes back is awaited, or iterated when it is a stream."""
        method = getattr(self._handle.instance, self._name)
        if inspect.isasyncgenfunction(method):
            return self._items(method(*args, **kwargs))
        task = asyncio.create_task(self._alive(_answer(method, *args, **kwargs)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(task)  # giving up on an answer does not stop the call

    async def _items(self, stream: AsyncIterator[object]) -> AsyncIterator[Awaitable[object]]:
        while (item := await self._alive(anext(stream, None))) is not None:
            ready: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            ready.set_result(item)
            yield ready

    async def _alive(self, work: Awaitable[object]) -> object:
        task = asyncio.ensure_future(work)
        death = asyncio.create_task(self._handle.dead.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not self._handle.dead.is_set():
                return task.result()
        except Exception as error:  # noqa: BLE001 - as Ray does with all of them
            raise RayTaskError(self._name, "", error).as_instanceof_cause() from None
        finally:
            for leftover in (task, death):
                leftover.cancel()
        raise ActorDiedError


async def _answer(method: Callable[..., object], *args: object, **kwargs: object) -> object:
    result = method(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result
