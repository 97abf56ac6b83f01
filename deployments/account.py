"""What one request tells the gateway's metrics, whichever way it ends."""

import asyncio
import time
from types import TracebackType
from typing import Self

from cluster.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    RequestFailed,
    Unavailable,
    UnknownModel,
)
from cluster.metrics import GatewayMetrics
from cluster.request import FinishReason
from cluster.text.stream import TextDelta
from deployments.answers import Answers

REFUSALS = (
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    Unavailable,
    UnknownModel,
)
ENDED_BY_CALLER = (asyncio.CancelledError, GeneratorExit, DeadlineExceeded)


class Account:
    """Counts one request, from the moment it is made; settled on leaving the `with`.

    It has ended when all of its answers have; each has a first token and gaps of its own. Being
    cancelled or closed at any moment is an abort. A request that is turned away before its first
    delta is a refusal; one whose own tokens cannot go on has failed; whatever else goes wrong is
    an error. `tenant` is whose request it is, as soon as that is known.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self.tenant = ""
        self._num_cached_tokens = 0  # counted so far
        self._arrived = time.perf_counter()
        self._latest: dict[int, float] = {}  # when each answer that has begun was last heard of
        self._started = False
        self._finish_reason: FinishReason | None = None

    def deliver(self, index: int, delta: TextDelta, answers: Answers) -> None:
        """Count what of answer `index` goes out to the caller now; `answers` has it already."""
        metrics = self._metrics.of(self.tenant)
        if not self._started:
            self._started = True
            metrics.started(num_prompt_tokens=answers.num_prompt_tokens)
        if num_cached_tokens := answers.each[0].num_cached_tokens - self._num_cached_tokens:
            self._num_cached_tokens += num_cached_tokens
            metrics.cached(num_cached_tokens)
        if num_tokens := len(delta.token_ids):
            now = time.perf_counter()
            gap_seconds = now - self._latest.get(index, self._arrived)
            first = index not in self._latest
            metrics.chunk(num_tokens=num_tokens, gap_seconds=gap_seconds, first=first)
            self._latest[index] = now
        self._finish_reason = answers.finish_reason

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._arrived
        metrics = self._metrics.of(self.tenant)
        if self._finish_reason is not None:
            metrics.ended(self._finish_reason, seconds=seconds)
        elif isinstance(error, ENDED_BY_CALLER):
            metrics.ended(FinishReason.ABORT, seconds=seconds)
        elif isinstance(error, RequestFailed):
            metrics.ended(FinishReason.FAILED, seconds=seconds)
        elif isinstance(error, REFUSALS) and not self._started:
            metrics.refused()
        else:
            metrics.ended(FinishReason.ERROR, seconds=seconds)
