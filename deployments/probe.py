"""Losslessness, watched while serving: some answers are given again without drafts, and compared.

Which token comes next is the target's own say, drafts or not; so the second answer has to be the
first one to the last bit. The second is given below everything else: at a priority no caller can
ask for, only where an engine has room, to no tenant, and past the prefix cache in both directions
(a cache that drafts had spoilt would spoil both answers alike).
"""

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

from cluster.errors import DrafthouseError
from cluster.messages import ModelInfo, Rule, TokenDelta
from cluster.metrics import GatewayMetrics
from cluster.request import FinishReason, Request, SpeculationParams
from deployments.backend import Backend

logger = logging.getLogger(__name__)

PRIORITY = -1000  # below what any caller may ask for
MAX_WAITING = 8  # answers kept to be given again; what is chosen beyond them is let go
POLL_SECONDS = 0.1  # between two looks for room
PATIENCE_SECONDS = 60.0  # after which an answer is let go that found no room


@dataclass(slots=True)
class Told:
    """What an answer was, as far as its caller took it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    failed: bool = False

    def add(self, delta: TokenDelta) -> None:
        """Take in a delta."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.failed |= delta.finish_reason in {FinishReason.ERROR, FinishReason.FAILED}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two answers differ: in the token, in its logprob, or by the end."""

    position: int
    kind: str


def is_probed(request: Request, model: ModelInfo) -> bool:
    """Whether an answer with drafts has to be that without, to the last bit.

    Not so for sampling under Rule.RATIO, nor where the engine says that its bits vary. What was
    answered without drafts proves nothing.
    """
    decided_by_seed = model.verification == Rule.COUPLED or request.sampling.temperature == 0
    return request.speculation.enabled and decided_by_seed and not model.variant_operations


def again(request: Request, told: Told) -> Request:
    """The same request without drafts, for as many tokens as there were."""
    return replace(
        request,
        request_id=f"probe-{uuid.uuid4().hex}",
        speculation=SpeculationParams(enabled=False),
        stopping=replace(request.stopping, max_tokens=len(told.token_ids)),
        priority=PRIORITY,
        tenant="",
        weight=1.0,
        deadline_seconds=None,
        trace_ratio=0.0,
        prompt_logprobs=False,
        cache_salt=f"probe-{uuid.uuid4().hex}",
    )


def first_divergence(told: Told, repeated: Told) -> Divergence | None:
    """Where two answers part; None when they are the same."""
    for position, (ours, theirs) in enumerate(
        zip(told.token_ids, repeated.token_ids, strict=False)
    ):
        if ours != theirs:
            return Divergence(position, "token")
        if told.logprobs[position : position + 1] != repeated.logprobs[position : position + 1]:
            return Divergence(position, "logprob")
    if len(told.token_ids) != len(repeated.token_ids):
        return Divergence(min(len(told.token_ids), len(repeated.token_ids)), "length")
    return None


class ProbedBackend:
    """A backend of which `share` of the answers are given again, for comparison.

    `has_room` says whether an engine has places that nobody needs. Close it in the end.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: GatewayMetrics,
        *,
        share: float,
        has_room: Callable[[], bool],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._share = share
        self._has_room = has_room
        self._draw = draw
        self._waiting: asyncio.Queue[tuple[Request, Told]] = asyncio.Queue(MAX_WAITING)
        self._probing = asyncio.create_task(self._probe())

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The backend's own deltas."""
        answer = cast("AsyncGenerator[TokenDelta, None]", self._backend.generate(request))
        chosen = is_probed(request, self._backend.describe()) and self._draw() < self._share
        told = Told()
        try:
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    if chosen:
                        told.add(delta)
                    yield delta
        finally:
            if told.token_ids and not told.failed and not self._waiting.full():
                self._waiting.put_nowait((request, told))

    def ready(self) -> bool:
        """As the backend."""
        return self._backend.ready()

    def describe(self) -> ModelInfo:
        """As the backend."""
        return self._backend.describe()

    async def settle(self) -> None:
        """Return when everything that was chosen has been compared or let go."""
        await self._waiting.join()

    def close(self) -> None:
        """Let go of what has not been compared."""
        self._probing.cancel()

    async def _probe(self) -> None:
        while True:
            request, told = await self._waiting.get()
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._compare(request, told)
            except (TimeoutError, DrafthouseError) as error:
                logger.info("a probe was let go: %s", type(error).__name__)
            except Exception:
                logger.exception("a probe failed")
            finally:
                self._waiting.task_done()

    async def _compare(self, request: Request, told: Told) -> None:
        """Give the answer again and count how it compares. Raises DrafthouseError."""
        while not self._has_room():  # noqa: ASYNC110 - a load, which has no event to wait for
            await asyncio.sleep(POLL_SECONDS)
        repeated = Told()
        answer = self._backend.generate(again(request, told))
        async with aclosing(cast("AsyncGenerator[TokenDelta, None]", answer)) as deltas:
            async for delta in deltas:
                repeated.add(delta)
                if delta.finish_reason in {FinishReason.ERROR, FinishReason.FAILED}:
                    return
        divergence = first_divergence(told, repeated)
        self._metrics.probed(diverged=divergence is not None)
        if divergence is not None:
            logger.error(
                "request %s diverges from its answer without drafts, at token %d of %d (%s)",
                request.request_id,
                divergence.position,
                len(told.token_ids),
                divergence.kind,
                extra={
                    "request_id": request.request_id,
                    "fields": {
                        "position": divergence.position,
                        "kind": divergence.kind,
                        "num_tokens": len(told.token_ids),
                        "num_prompt_tokens": len(request.prompt_token_ids),
                        "seed": request.sampling.seed,
                    },
                },
            )
