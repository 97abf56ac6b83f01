"""A backend with all that is configured around it: log lines, traces, probes."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import cast

from cluster.config import DrafthouseConfig
from cluster.errors import MissingExtra
from cluster.logs import current_request_id
from cluster.messages import ModelInfo, TokenDelta
from cluster.metrics import GatewayMetrics
from cluster.request import Request
from deployments.backend import Backend
from deployments.probe import ProbedBackend

logger = logging.getLogger(__name__)

ROOM = 0.5  # of an engine's places: with no more taken it has some to spare for probes


class LoggedBackend:
    """A backend of which each answer leaves one line, and whose lines all name their request.

    Also counts how long tokens take from the engine until they are written.
    """

    def __init__(self, backend: Backend, metrics: GatewayMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The backend's own deltas."""
        current_request_id.set(request.request_id)
        begin = time.perf_counter()
        num_tokens = num_drafted = num_accepted = 0
        ended = "closed"  # by a stop text, by the caller, or by an error
        answer = cast("AsyncGenerator[TokenDelta, None]", self._backend.generate(request))
        try:
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    num_tokens += len(delta.token_ids)
                    num_drafted += delta.num_drafted
                    num_accepted += delta.num_accepted
                    ended = delta.finish_reason or ended
                    yield delta
                    if delta.emitted_at is not None:
                        self._metrics.delivered(seconds=time.time() - delta.emitted_at)
        except Exception as error:
            ended = type(error).__name__
            raise
        finally:
            seconds = round(time.perf_counter() - begin, 4)
            fields = {
                "tenant": request.tenant,
                "prompt_tokens": len(request.prompt_token_ids),
                "completion_tokens": num_tokens,
                "drafted": num_drafted,
                "accepted": num_accepted,
                "seconds": seconds,
                "ended": ended,
            }
            logger.info(
                "request %s: %d tokens in %.3f s, %s",
                request.request_id,
                num_tokens,
                seconds,
                ended,
                extra={"request_id": request.request_id, "fields": fields},
            )

    def ready(self) -> bool:
        """As the backend."""
        return self._backend.ready()

    def describe(self) -> ModelInfo:
        """As the backend."""
        return self._backend.describe()


def observed(
    backend: Backend,
    config: DrafthouseConfig,
    metrics: GatewayMetrics,
    *,
    instance: str,
    lowest_load: Callable[[], int | None],
    closing: AsyncExitStack,
) -> Backend:
    """The backend with what is configured around it; `closing` ends that in its time.

    `lowest_load` is how many sequences the engine has that has the fewest, None without one.
    Raises MissingExtra when traces are asked for and their library is not there.
    """
    settings = config.observability
    if settings.probe_share:

        def has_room() -> bool:
            load = lowest_load()
            return load is not None and load <= ROOM * config.target.max_num_seqs

        probed = ProbedBackend(backend, metrics, share=settings.probe_share, has_room=has_room)
        closing.callback(probed.close)
        backend = probed
    if settings.otlp_endpoint is not None:
        try:
            # An extra, which not every installation has.
            from deployments.tracing import TracedBackend, build_provider  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtra(extra="tracing", purpose="observability.otlp_endpoint") from error
        provider = build_provider(settings.otlp_endpoint, instance=instance)
        closing.push_async_callback(asyncio.to_thread, provider.shutdown)  # it sends what is left
        backend = TracedBackend(
            backend,
            provider.get_tracer("drafthouse"),
            step_sample_ratio=settings.step_sample_ratio,
        )
    return LoggedBackend(backend, metrics)
