"""A short visit to a Ray cluster that serves: something is asked, nothing is left behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.actors.session import APP_NAME, hush, join
from cluster.errors import DrafthouseError, Unavailable

ROUTER = "Router"
ANSWER_SECONDS = 900.0  # weights may have to be fetched


@contextmanager
def visited_ray(address: str) -> Iterator[str]:
    """Joined to the cluster; the id of the node this process is on. Raises Unavailable."""
    join(address)
    hush()
    try:
        yield ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()


def ask_router(method: str, *args: object) -> Any:  # noqa: ANN401 - whatever the method returns
    """What the router of the application answers. Raises its own errors, and Unavailable."""
    try:
        router = serve.get_deployment_handle(ROUTER, APP_NAME)
        return getattr(router, method).remote(*args).result(timeout_s=ANSWER_SECONDS)
    except RayTaskError as error:
        if isinstance(error.cause, DrafthouseError):
            raise error.cause from None
        raise
    except (TimeoutError, RayError, RayServeException) as error:
        raise Unavailable(f"the router does not answer: {type(error).__name__}") from error
