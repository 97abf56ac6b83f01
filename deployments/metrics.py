"""One page of metrics made of every process, gathered when somebody asks."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.actors.membership import Snapshot
from cluster.metrics import Family, render

logger = logging.getLogger(__name__)

Name = tuple[str, str]  # process, replica
SCRAPE_SECONDS = 2.0  # a process that has not answered by then is left out
FRESH_SECONDS = 1.0


class MetricsPage:
    """Made at most once in FRESH_SECONDS, however many ask."""

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        router: DeploymentHandle,
        gateways: DeploymentHandle,
    ) -> None:
        self._snapshot = snapshot
        self._router = router
        self._gateways = gateways
        self._lock = asyncio.Lock()
        self._page = b""
        self._made = float("-inf")

    async def get(self) -> bytes:
        """The page in the text format of Prometheus."""
        async with self._lock:
            if time.monotonic() - self._made > FRESH_SECONDS:
                processes = [item async for item in self._processes()]
                self._page = await asyncio.to_thread(render, dict(processes))
                self._made = time.monotonic()
        return self._page

    async def _processes(self) -> AsyncIterator[tuple[Name, tuple[Family, ...]]]:
        calls: dict[Name, Awaitable[tuple[Family, ...]]] = {
            (member.kind.value, member.member_id): member.handle.metrics.remote()
            for member in self._snapshot().members
        }
        calls["router", "router"] = self._router.metrics.remote()
        gateways = asyncio.create_task(self._gateway_metrics())
        answers = await asyncio.gather(*(_within(call) for call in calls.values()))
        for name, families in zip(calls, answers, strict=True):
            if families is not None:
                yield name, families
        for replica, families in await gateways:
            yield ("gateway", replica), families

    async def _gateway_metrics(self) -> list[tuple[str, tuple[Family, ...]]]:
        """All gateways' counts, this one's among them: a scrape reaches any one of them."""
        answers = await self._gateways.broadcast("metrics").results_async(
            timeout_s=SCRAPE_SECONDS, return_exceptions=True
        )
        return [answer for answer in answers if not isinstance(answer, Exception)]


async def _within(call: Awaitable[tuple[Family, ...]]) -> tuple[Family, ...] | None:
    """A process's counts, or None when it is gone or late."""
    try:
        async with asyncio.timeout(SCRAPE_SECONDS):
            return await call
    except (TimeoutError, RayError, RayServeException) as error:
        logger.debug("left out of the metrics: %s", type(error).__name__)
        return None
