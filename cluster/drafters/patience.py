"""How long to wait for one draft worker, and when to ask it at all.

trusted ──late, garbled, or waiting costs more than it brings──> distrusted
   ^    asked and waited for at every step                          │  asked after 0, 8, 16, 32,
   └──────────an answer came in a time that pays────────────────────┘  ... steps, never waited for

Waiting for a worker that was late once more would cost a deadline each time. Asking it without
waiting costs a message, and its answer shows both how quick and how right it is: the tokens the
engine goes on to commit grade a draft whether it was used or not.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from statistics import median

from cluster.interfaces import DraftQuery

TIMES_SLOWEST = 4.0  # of the recent round trips: a longer one is no accident of scheduling
LEAST_SECONDS = 0.01  # that any process may be kept from its core
FIRST_PAUSE = 8
LONGEST_PAUSE = 256
FORGIVEN = 16  # answers in time after which earlier strikes do not count
MANY_STEPS = 8  # of which the length must be known before waiting is weighed against it
MANY_DRAFTS = 16  # that must be graded before


class Gain:
    """How many tokens of a draft turn out right, on average of the latest."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, Sequence[int]]] = {}  # base length, and the draft
        self._mean = 0.0
        self._num_graded = 0.0

    @property
    def tokens(self) -> float | None:
        """Right tokens a draft; None while few are known."""
        return self._mean if self._num_graded >= MANY_DRAFTS else None

    def drafted(self, seq_id: int, base_length: int, token_ids: Sequence[int]) -> None:
        """Remember a draft until it can be graded, unless there is one to be graded yet."""
        if not token_ids:  # the worker may still be taking the context in
            self._grade(0, weight=0.25)
        else:
            self._drafts.setdefault(seq_id, (base_length, token_ids))

    def observe(self, queries: Iterable[DraftQuery]) -> None:
        """Grade what the sequences' tokens have come to."""
        for query in queries:
            base_length, drafted = self._drafts.get(query.seq_id, (0, ()))
            known = query.token_ids[base_length : base_length + len(drafted)]
            num_right = 0
            while num_right < len(known) and known[num_right] == drafted[num_right]:
                num_right += 1
            if drafted and (num_right < len(known) or num_right == len(drafted)):
                del self._drafts[query.seq_id]
                self._grade(num_right, weight=1.0)

    def forget(self, seq_id: int) -> None:
        """A sequence ended."""
        self._drafts.pop(seq_id, None)

    def _grade(self, num_right: int, *, weight: float) -> None:
        self._num_graded += weight
        share = weight / min(self._num_graded, MANY_DRAFTS)
        self._mean += min(share, 1.0) * (num_right - self._mean)


class StepLengths:
    """How long the engine is busy between one draft and the next; `seconds` of a usual step."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=2 * MANY_STEPS - 1)

    def observe(self, seconds: float) -> None:
        """One more step."""
        self._latest.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The median; None while few are known."""
        return median(self._latest) if len(self._latest) >= MANY_STEPS else None


class Patience:
    """What one worker's answers have earned it. Steps are counted by whoever asks."""

    def __init__(self, *, most_seconds: float) -> None:
        self.trusted = True
        self._most_seconds = most_seconds
        self._slowest: float | None = None  # of late, fading
        self._usual = 0.0
        self._num_strikes = 0
        self._num_in_time = 0
        self._next_step = 0  # when to ask again without trust
        self._on_probation = False  # the next answer may bring trust back
        self._probe_seconds = inf

    def may_ask(self, step: int, *, pays: float) -> bool:
        """Whether to send a message at this step; `pays` are the seconds a draft would save.

        A probe that was quick is trusted as soon as what it brought is known to be worth it.
        """
        if not self.trusted and self._probe_seconds <= min(pays, self._most_seconds):
            self.trusted = True
            self._num_in_time = 0
            self._usual = self._probe_seconds
        return self.trusted or step >= self._next_step

    def asked(self, step: int) -> None:
        """A message was sent."""
        if not self.trusted:
            self._strike(step)
            self._on_probation = True

    def deadline(self, pays: float) -> float:
        """Seconds to wait; `pays` are those that a draft is expected to save."""
        slowest = inf if self._slowest is None else self._slowest
        return min(self._most_seconds, pays, max(TIMES_SLOWEST * slowest, LEAST_SECONDS))

    def answered(self, seconds: float, *, step: int, pays: float) -> None:
        """An answer came `seconds` after it was asked for, waited for or not."""
        faded = seconds if self._slowest is None else self._slowest
        self._slowest = max(seconds, 0.95 * faded + 0.05 * seconds)
        self._usual += 0.2 * (seconds - self._usual)
        if not self.trusted:
            self._probe_seconds = seconds if self._on_probation else inf
        elif self._usual > pays:
            self.failed(step=step)
        else:
            self._num_in_time += 1
            if self._num_in_time >= FORGIVEN:
                self._num_strikes = 0

    def failed(self, *, step: int) -> None:
        """It was late, its answer made no sense, or it does not pay.

        The first time what is late may clear itself by coming soon after all.
        """
        self._on_probation = self.trusted and self._num_strikes == 0
        self._probe_seconds = inf
        self.trusted = False
        self._strike(step)

    def _strike(self, step: int) -> None:
        self._num_strikes += 1
        if self._num_strikes > 1:
            pause = FIRST_PAUSE * 2 ** min(self._num_strikes - 2, 10)
            self._next_step = step + min(pause, LONGEST_PAUSE)
