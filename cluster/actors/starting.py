"""Starting Ray, which now and then does not come up."""

from collections.abc import Callable
from typing import Any, TypeVar

from ray._private.node import Node

T = TypeVar("T")

NEVER_CAME_UP = (
    "Timed out waiting for file",  # in which Ray's first process writes its port
    "timed out during startup",  # of a node, whose process was not heard of
)


def started(start: Callable[[], T]) -> T:
    """What `start` returns; asked a second time when a process of Ray's never came up.

    That happens once in hundreds of starts, and leaves the process behind.
    """
    try:
        return start()
    except Exception as error:  # Ray raises no other of a node
        if not any(message in str(error) for message in NEVER_CAME_UP):
            raise
        for node in _nodes_in(error):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    return start()


def _nodes_in(error: BaseException) -> list[Any]:
    """The nodes that were being started when it was raised."""
    nodes = []
    traceback = error.__traceback__
    while traceback is not None:
        candidate = traceback.tb_frame.f_locals.get("self")
        if isinstance(candidate, Node) and candidate not in nodes:
            nodes.append(candidate)
        traceback = traceback.tb_next
    return nodes
