"""The thread that a target computes in, as drafters beside it use it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")


class Thread(Protocol):
    """Runs what it is given one after the other, between the target's steps."""

    def submit(self, compute: Callable[[], T], /) -> Future[T]:
        """Run something in it, after what it was given before."""
        ...
