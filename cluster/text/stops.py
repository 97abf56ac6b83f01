"""Finds stop strings in text that comes in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """Text that is safe to show, and the stop string that follows it, if one does."""

    text: str
    stop: str | None = None


class StopChecker:
    """Holds text back while it may be the beginning of a stop string.

    The stop that is completed first wins; of several completed by the same character, the
    longest. So the cut depends on the text alone, never on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)
        self._held = ""

    def push(self, text: str) -> Checked:
        """Take in the next text. After a stop nothing may be pushed any more."""
        window = self._held + text
        found = [
            (place + len(stop), place, stop)
            for stop in self._stops
            if (place := window.find(stop, max(0, len(self._held) - len(stop) + 1))) >= 0
        ]
        if not found:
            return Checked(self._release(window))
        _, place, stop = min(found)
        self._held = ""
        return Checked(window[:place], stop)

    def pass_by(self, text: str) -> str:
        """Take in text that completes no stop, whatever it says, but may begin one."""
        return self._release(self._held + text)

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _release(self, window: str) -> str:
        """Keep the longest end of the window that begins a stop; give out the rest."""
        for length in range(min(self._longest, len(window)), 0, -1):
            if window[-length:] in self._beginnings:
                self._held = window[-length:]
                return window[:-length]
        self._held = ""
        return window
