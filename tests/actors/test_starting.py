"""Ray is started a second time where its first process never came up, and only there."""

import pytest
import ray
from ray.exceptions import RaySystemError

from cluster.actors.starting import NEVER_CAME_UP, started


class Start:
    """Fails with these messages, one after the other; then comes up."""

    def __init__(self, *messages: str) -> None:
        self.messages = list(messages)

    def __call__(self) -> str:
        """Come up, or not."""
        if self.messages:
            raise Exception(self.messages.pop(0))  # noqa: TRY002 - as Ray does
        return "up"


@pytest.mark.parametrize("message", NEVER_CAME_UP)
def test_a_start_that_never_came_up_is_repeated_once(message: str) -> None:
    """Once is what happens; more often is a fault that has to be seen."""
    assert started(Start(f"The node: {message} /tmp/port")) == "up"
    with pytest.raises(Exception, match=message):
        started(Start(message, message))


def test_another_error_is_not() -> None:
    """What Ray says is wrong with how it was called stays wrong."""
    start = Start("not enough memory")
    with pytest.raises(Exception, match="not enough memory"):
        started(start)
    assert not start.messages


def test_a_call_without_a_cluster_fails_and_looks_for_none() -> None:
    """Not even in a process that imported Ray for its actors' sake alone: see tests/conftest.py."""
    assert not ray.is_initialized()
    with pytest.raises(RaySystemError, match="not been started"):
        ray.put(1)
