"""What one tenant has used of what it may, on a clock that is given.

A bucket holds at most one minute's worth, or 1 if that is more, and fills at its rate. A request
takes 1 from the bucket of requests, and needs 1 in that of tokens: its prompt is taken out at once
and the rows of its answers as they are computed, beyond zero if need be. Such debts are paid
before anything else is admitted. So in any t seconds the requests that are admitted bring at most

    rate * t + one minute's worth + what those admitted while something was left have brought
"""

from collections.abc import Callable

from cluster.errors import InvalidRequest, QuotaExceeded
from cluster.tenant import TenantLimits

MINUTE = 60.0
BUSY_RETRY_SECONDS = 1.0  # by when one of the requests under way may have ended


class TokenBucket:
    """Fills at `per_minute`; it may be in debt."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._most = max(per_minute, 1.0)
        self._clock = clock
        self._level = self._most
        self._at = clock()

    @property
    def level(self) -> float:
        """What is in it now; below zero, what is owed."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self.per_minute / MINUTE, self._most)
        self._at = now
        return self._level

    @property
    def full(self) -> bool:
        """Whether it holds all that it can."""
        return self.level >= self._most

    def take(self, amount: float) -> None:
        """Take so much out, or put it back if below zero."""
        self._level = min(self.level - amount, self._most)

    def seconds_until(self, level: float) -> float:
        """When it will hold so much, if nobody takes any; 0 if it does."""
        return max(level - self.level, 0.0) * MINUTE / self.per_minute


class Quota:
    """One tenant's use. Every `admit` that returns is followed by one `release`."""

    def __init__(self, limits: TenantLimits, *, clock: Callable[[], float]) -> None:
        self._most_running = limits.concurrent_requests
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)
        self.num_running = 0

    @property
    def at_rest(self) -> bool:
        """Whether it is as if it were new."""
        buckets = (self._requests, self._tokens)
        return not self.num_running and all(bucket is None or bucket.full for bucket in buckets)

    def admit(self, *, num_answers: int, num_rows: int) -> None:
        """Take in a request for so many answers, whose prompts have `num_rows` together.

        Each of the answers runs by itself. Raises QuotaExceeded with the time after which there
        is room, and InvalidRequest where there never is; nothing is taken then.
        """
        most = self._most_running
        if most is not None and num_answers > most:
            problem = f"{num_answers} are over the limit of {most} answers at once"
            raise InvalidRequest("sampling.num_answers", problem)
        if most is not None and self.num_running + num_answers > most:
            raise QuotaExceeded(
                limit="concurrent requests", allowed=most, retry_seconds=BUSY_RETRY_SECONDS
            )
        _check(self._requests, "requests a minute")
        _check(self._tokens, "tokens a minute")
        if self._requests is not None:
            self._requests.take(1)
        self.num_running += num_answers
        self.charge(num_rows)

    def charge(self, num_rows: int) -> None:
        """Count rows that a target computes; below zero, rows counted that it need not."""
        if self._tokens is not None:
            self._tokens.take(num_rows)

    def release(self, *, num_answers: int) -> None:
        """So many answers have ended."""
        self.num_running -= num_answers


def _bucket(per_minute: float | None, clock: Callable[[], float]) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, clock)


def _check(bucket: TokenBucket | None, limit: str) -> None:
    """Raises QuotaExceeded unless there is 1 in it."""
    if bucket is not None and (seconds := bucket.seconds_until(1.0)) > 0:
        raise QuotaExceeded(limit=limit, allowed=bucket.per_minute, retry_seconds=seconds)
