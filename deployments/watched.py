"""What files hold, read again when they change."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from cluster.errors import ConfigurationError

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int] | None, ...]

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0


class Watched(Generic[T]):
    """The value that `read` makes of some files; a broken file leaves the last good one.

    Links are followed, so that a volume whose files are swapped behind a link counts as changed.
    Raises what `read` raises, at the start only: ConfigurationError.
    """

    def __init__(self, paths: Iterable[Path], read: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._stamp = self._look()
        self._complained: Stamp | None = None  # of files that were found broken
        self.value = read()

    def refresh(self) -> bool:
        """Read the files again if they have changed; whether there is a new value."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        try:
            self.value = self._read()
        except ConfigurationError as error:
            if stamp != self._complained:
                logger.error("what was read before still holds: %s", error)  # noqa: TRY400
            self._complained = stamp
            return False
        self._stamp, self._complained = stamp, None
        return True

    async def watch(self) -> None:
        """Refresh every second; never ends by itself."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def _look(self) -> Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
