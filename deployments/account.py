"""What one request tells the gateway's metrics, whichever way it ends."""

import asyncio
import time
from types import TracebackType
from typing import Self

from cluster.errors import InvalidRequest, Overloaded, Unavailable, UnknownModel
from cluster.metrics import GatewayMetrics
from cluster.request import FinishReason
from cluster.text.stream import TextDelta

REFUSALS = (InvalidRequest, Overloaded, Unavailable, UnknownModel)


class Account:
    """Counts one request, from the moment it is made; settled on leaving the `with`.

    Being cancelled or closed at any moment is an abort. A request that is turned away before its
    first delta is a refusal; whatever else goes wrong is an error.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._arrived = self._latest = time.perf_counter()
        self._started = False
        self._num_tokens = 0
        self._finish_reason: FinishReason | None = None

    def deliver(self, delta: TextDelta, *, num_prompt_tokens: int) -> None:
        """Count what goes out to the caller now."""
        if not self._started:
            self._started = True
            self._metrics.started(num_prompt_tokens=num_prompt_tokens)
        if num_tokens := len(delta.token_ids):
            now = time.perf_counter()
            first = self._num_tokens == 0
            self._metrics.chunk(num_tokens=num_tokens, gap_seconds=now - self._latest, first=first)
            self._latest = now
            self._num_tokens += num_tokens
        self._finish_reason = delta.finish_reason

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._arrived
        if self._finish_reason is not None:
            self._metrics.ended(self._finish_reason, seconds=seconds)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._metrics.ended(FinishReason.ABORT, seconds=seconds)
        elif isinstance(error, REFUSALS) and not self._started:
            self._metrics.refused()
        else:
            self._metrics.ended(FinishReason.ERROR, seconds=seconds)
