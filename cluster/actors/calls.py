"""Where Ray's errors become ours."""

from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError

from cluster.errors import DrafthouseError, TargetUnavailable

T = TypeVar("T")


async def ask_target(call: Awaitable[T]) -> T:
    """Await an engine's answer.

    Raises the engine's own error as it was raised there, and TargetUnavailable when the engine is
    gone or cannot be reached.
    """
    try:
        return await call
    except RayActorError as error:
        raise TargetUnavailable("the engine is gone") from error
    except RayTaskError as error:
        if isinstance(error.cause, DrafthouseError):
            raise error.cause from None
        raise
