"""Remote engines behind the one method of a local engine: `generate(request)`.

request ──> least loaded engine ──> tokens ... engine dies
                                                  │
            another engine, or the replacement <──┘  prompt + tokens so far, same seed:
                                                     nothing lost, nothing doubled
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from ray.actor import ActorHandle

from cluster.actors.link import EngineLink
from cluster.errors import TargetUnavailable
from cluster.messages import ModelInfo, TokenDelta
from cluster.request import Request

logger = logging.getLogger(__name__)

MAX_MOVES = 5  # engines one request may see die: more, and it is suspected of killing them


class EnginePool:
    """The engines of one gateway. `gateway_id` is new for every start of a gateway.

    `configured` describes the model until an engine has described itself. A request that was
    under way when its engine died waits up to `patience_seconds` for another; a new request is
    refused at once when there is none.
    """

    def __init__(
        self, gateway_id: str, configured: ModelInfo, *, patience_seconds: float = 60.0
    ) -> None:
        self._gateway_id = gateway_id
        self._info = configured
        self._patience_seconds = patience_seconds
        self._num_links = 0
        self._links: dict[str, EngineLink] = {}
        self._changed = asyncio.Event()

    def ready(self) -> bool:
        """Whether some engine takes requests now."""
        return any(link.accepts for link in self._links.values())

    def describe(self) -> ModelInfo:
        """What the engines serve, in the words of the one that was asked last."""
        for link in self._links.values():
            self._info = link.info or self._info
        return self._info

    def set_engines(self, handles: Mapping[str, ActorHandle]) -> None:
        """Use these engines from now on, by engine id.

        An engine that is not among them any more gets no new requests and finishes those it has.
        """
        for engine_id, link in list(self._links.items()):
            if engine_id not in handles:
                link.retire()
            if link.closed:  # a broken link to an engine that is still there is made anew
                del self._links[engine_id]
        for engine_id in handles.keys() - self._links.keys():
            self._num_links += 1
            self._links[engine_id] = EngineLink(
                engine_id,
                handles[engine_id],
                stream=f"{self._gateway_id}.{self._num_links}",
                on_change=self._changed.set,
            )

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to the one with a finish reason. Closing it aborts.

        Raises what Engine.submit raises, and TargetUnavailable when no engine can go on.
        """
        link = self._least_loaded()
        output_token_ids = list(request.output_token_ids)
        num_moves = 0
        while True:
            rest = replace(request, output_token_ids=tuple(output_token_ids))
            try:
                async with aclosing(link.generate(rest)) as deltas:
                    async for delta in deltas:
                        output_token_ids += delta.token_ids
                        yield delta
                        if delta.finish_reason is not None:
                            return
            except TargetUnavailable as lost:
                num_moves += 1
                if num_moves > MAX_MOVES:
                    raise
                logger.warning("request %s moves: %s", request.request_id, lost)
            link = await self._replacement()

    def close(self) -> None:
        """Let go of every engine."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _least_loaded(self) -> EngineLink:
        links = [link for link in self._links.values() if link.accepts]
        if not links:
            raise TargetUnavailable("no target is ready")
        return min(links, key=lambda link: link.load)

    async def _replacement(self) -> EngineLink:
        """An engine that accepts, waited for."""
        try:
            async with asyncio.timeout(self._patience_seconds):
                while not self.ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TargetUnavailable(
                f"the target is gone and none came in {self._patience_seconds} s"
            ) from None
        return self._least_loaded()
