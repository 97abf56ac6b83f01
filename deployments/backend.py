"""What the gateway's services ask for answers."""

from collections.abc import AsyncIterator
from typing import Protocol

from cluster.messages import ModelInfo, TokenDelta
from cluster.request import Request


class Backend(Protocol):
    """What continues requests: an engine in this process, or a pool of them."""

    def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """The request's deltas; the last has a finish reason.

        An async generator: closing it aborts the request, and returns without waiting for the
        engine. Raises the errors of cluster.errors, at the call or at the first delta.
        """
        ...

    def ready(self) -> bool:
        """Whether a request would be taken now."""
        ...

    def describe(self) -> ModelInfo:
        """What is served."""
        ...
