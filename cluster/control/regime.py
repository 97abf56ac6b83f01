"""Whether sequences are drafted for at all."""

from enum import StrEnum

STAY_SECONDS = 1.0
MARGIN = 0.01  # of the goodput: what drafting must bring before it is begun again


class Reason(StrEnum):
    """What decides whether drafting pays."""

    LOAD = "load"  # it would, were fewer sequences in the step
    ACCEPTANCE = "acceptance"  # too few drafts are kept
    DRAFT_TIME = "draft_time"  # it would, were the drafts there sooner


class Regime:
    """Drafting, or not: changes at most once in STAY_SECONDS, and not for the last percent.

    Where drafting costs more than it brings it ends at once. Where it only brings nothing, since
    nobody is asked, it costs nothing either: it ends after STAY_SECONDS of that.
    """

    def __init__(self, *, stay_seconds: float = STAY_SECONDS) -> None:
        self._stay_seconds = stay_seconds
        self._changed_at: float | None = None
        self._gained_at: float | None = None
        self.drafting = True

    def changes(self, gain: float, *, now: float) -> bool:
        """Take note of what drafting would bring, as a part of the goodput; whether it changed."""
        if gain > 0 or self._gained_at is None:
            self._gained_at = now
        if self._changed_at is not None and now - self._changed_at < self._stay_seconds:
            return False
        if not self._should_change(gain, now):
            return False
        self.drafting = not self.drafting
        self._changed_at = now
        return True

    def _should_change(self, gain: float, now: float) -> bool:
        if not self.drafting:
            return gain > MARGIN
        idle = self._gained_at is not None and now - self._gained_at >= self._stay_seconds
        return gain < 0 or idle
