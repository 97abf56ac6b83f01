"""An event loop whose time passes only by waiting: hours of sleeping are over at once."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Where a loop would sleep, its clock is put forward instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready already; nothing else can become so."""
        assert timeout is not None, "everybody waits, and for nothing"
        if timeout > 0:
            self.now += timeout + 1e-9
        return super().select(0)  # type: ignore[no-any-return]


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds since the loop began."""
        return self._jump.now


def run_virtually(work: Coroutine[object, object, T]) -> T:
    """Run something that sleeps and computes, in the time that its computing takes."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
