"""A simulated engine: it jumps from one change of its batch to the next.

Between two changes (a request begins, a prompt is done, a sequence ends) every step is the same,
so that all sequences of one level come forward at one rate:

    queue -> prompt (one at a time, chunk by chunk beside the decodes) -> decoding -> done
"""

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from cluster.config import TargetConfig
from cluster.engine.limits import USUAL_PROMPT_ROWS
from cluster.messages import EngineLoad
from cluster.tools.simulation.guessing import LATE_LEVELS, LEVELS, Guesser, Situation

NEARLY = 1e-9
LEAST_SECONDS = 1e-9  # between two events of an engine: less may be lost in the sum, for ever
ANSWER_RATE = 0.05
RECENT_SECONDS = 3.0  # over which a rate is told
NEVER = math.inf


@dataclass(slots=True)
class Job:
    """A request on its way; times in seconds, `nan` until they come about.

    `prompt` tokens are to be computed and `output` to come: of one that moves, from there on.
    """

    index: int
    arrived_at: float
    prompt: int
    output: int
    level: int
    first_at: float = math.nan
    ended_at: float = math.nan


@dataclass(slots=True)
class _Level:
    """Sequences of one chance: `progress` tokens were made by who was there from the start.

    A sequence ends when progress reaches its mark.
    """

    progress: float = 0.0
    rate: float = 0.0
    marks: list[tuple[float, int, Job]] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """What an engine has done, up to its `now`."""

    tokens: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0
    steps: float = 0.0
    busy_seconds: float = 0.0


class _Rate:
    """One of the totals, in a second."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = 0.0
        self.per_second = 0.0

    def look(self, totals: Totals, seconds: float, keep: float) -> None:
        """So many seconds after the last look; `keep` of the rate stays."""
        value = getattr(totals, self._name)
        rate = (value - self._before) / seconds
        self._before = value
        self.per_second = keep * self.per_second + (1 - keep) * rate


class SimulatedEngine:
    """One target replica. Times that are given never fall.

    `late`, `wait` and `floor` (see Situation) hold from the next change of the batch on.
    """

    def __init__(
        self, engine_id: str, guesser: Guesser, limits: TargetConfig, *, now: float
    ) -> None:
        self.engine_id = engine_id
        self.started_at = now
        self.draining = False
        self.late = 0
        self.wait = 0
        self.floor = 0.0
        self.totals = Totals()
        self.next_at = NEVER
        self.guess = guesser.guess(Situation(counts=(0,) * (LEVELS + 1), prompt_rows=0))
        self._guesser = guesser
        self._limits = limits
        self._prompt_rows_beside = limits.max_prompt_rows_beside_decodes or USUAL_PROMPT_ROWS
        self._now = now
        self._levels = [_Level() for _ in range(LEVELS + 1)]
        self._counts = [0] * (LEVELS + 1)
        self._active: list[_Level] = []
        self._running = 0  # decoding
        self._queue: deque[Job] = deque()
        self._queued_prompt = 0
        self._prompt: Job | None = None
        self._prompt_left = 0.0
        self._prompt_rate = 0.0
        self._mean_answer = 0.0
        self._load: EngineLoad | None = None
        self._measured_at = now
        self._tokens, self._drafted, self._accepted = map(_Rate, ("tokens", "drafts", "accepted"))

    @property
    def num_held(self) -> int:
        """Sequences that run or wait."""
        return self._running + (self._prompt is not None) + len(self._queue)

    def submit(self, job: Job, *, now: float) -> None:
        """Take a request in."""
        self._advance(now)
        self._queue.append(job)
        self._queued_prompt += job.prompt
        self._load = None
        if self._prompt is None and self._running < self._limits.max_num_seqs:
            self._decide()

    def settle(self, *, now: float) -> list[Job]:
        """What ended by now; to be asked at `next_at`."""
        self._advance(now)
        self._load = None
        ended = [job for level in self._active for job in self._ended(level)]
        for job in ended:
            job.ended_at = now
            self._counts[job.level] -= 1
            self._mean_answer = self._mean_answer or job.output
            self._mean_answer += ANSWER_RATE * (job.output - self._mean_answer)
        self._running -= len(ended)
        if self._prompt is not None and self._prompt_left <= NEARLY:
            ended += self._begin_decoding(self._prompt)
        self._decide()
        return ended

    def hand_over(self, *, now: float) -> list[Job]:
        """Give up all there is: each goes on elsewhere, from the tokens it has."""
        self._advance(now)
        jobs = list(self._queue)
        if self._prompt is not None:
            jobs.append(self._prompt)
        for level in self._levels:
            for mark, _, job in level.marks:
                left = max(math.ceil(mark - level.progress), 1)
                job.prompt += job.output - left
                job.output = left
                jobs.append(job)
            level.marks.clear()
        self._queue.clear()
        self._prompt, self._running, self._queued_prompt = None, 0, 0
        self._counts = [0] * (LEVELS + 1)
        self._load = None
        self._decide()
        return jobs

    def load(self) -> EngineLoad:
        """As a real engine tells it."""
        if self._load is None:
            limits = self._limits
            full = limits.max_num_seqs
            held = self._running + (self._prompt is not None)
            self._load = EngineLoad(
                running=held,
                waiting=len(self._queue),
                free_blocks=full - held,
                num_blocks=full,
                step_id=int(self.totals.steps),
                max_num_seqs=full,
                max_num_waiting=limits.max_num_waiting,
                max_prompt_rows=self._prompt_rows_beside,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                prompt_tokens=int(self._queued_prompt + self._prompt_left),
                step_seconds=self.guess.seconds,
                base_seconds=self._guesser.base_seconds,
                row_seconds=self._guesser.row_seconds,
                tokens_per_step=self._tokens_per_step(),
                tokens_per_second=self._tokens.per_second,
                answer_tokens=self._mean_answer,
                price=self.guess.price,
                price_floor=self.floor,
                drafted_per_second=self._drafted.per_second,
                accepted_per_second=self._accepted.per_second,
                late_ratio=self.late / LATE_LEVELS,
            )
        return self._load

    def measure(self, now: float) -> None:
        """Look at what was done since the last look; what an engine tells follows it slowly."""
        self._advance(now)
        seconds = now - self._measured_at
        if seconds <= 0:
            return
        keep = math.exp(-seconds / RECENT_SECONDS)
        for rate in (self._tokens, self._drafted, self._accepted):
            rate.look(self.totals, seconds, keep)
        self._measured_at = now
        self._load = None

    def advance_to(self, now: float) -> Totals:
        """All that was done by then."""
        self._advance(now)
        return self.totals

    def _tokens_per_step(self) -> float:
        return 1 + self.guess.accepted / self._running if self._running else 1.0

    def _ended(self, level: _Level) -> list[Job]:
        ended = []
        while level.marks and level.marks[0][0] <= level.progress + NEARLY:
            ended.append(heappop(level.marks)[2])
        return ended

    def _begin_decoding(self, job: Job) -> list[Job]:
        """The prompt is computed, and with it comes the first token; it may be the last, too."""
        self._prompt = None
        if math.isnan(job.first_at):
            job.first_at = self._now
        self.totals.tokens += 1
        if job.output == 1:
            job.ended_at = self._now
            return [job]
        level = self._levels[job.level]
        heappush(level.marks, (level.progress + job.output - 1, job.index, job))
        self._counts[job.level] += 1
        self._running += 1
        return []

    def _advance(self, now: float) -> None:
        seconds = now - self._now
        self._now = now
        if seconds <= 0:
            return
        for level in self._active:
            level.progress += level.rate * seconds
        self._prompt_left -= self._prompt_rate * seconds
        if self._running or self._prompt is not None:
            guess, totals = self.guess, self.totals
            steps = seconds / guess.seconds
            totals.steps += steps
            totals.tokens += guess.tokens_per_second * seconds
            totals.drafts += guess.drafts * steps
            totals.accepted += guess.accepted * steps
            totals.busy_seconds += seconds

    def _decide(self) -> None:
        """The batch has changed: what its steps are from now on, and until when."""
        limits = self._limits
        if self._prompt is None and self._queue and self._running < limits.max_num_seqs:
            self._prompt = self._queue.popleft()
            self._queued_prompt -= self._prompt.prompt
            self._prompt_left = float(self._prompt.prompt)
        rows = 0
        if self._prompt is not None:
            rows = limits.max_num_batched_tokens
            if self._running:
                rows = min(rows, self._prompt_rows_beside)
            rows = min(rows, self._prompt.prompt)
        situation = Situation(
            counts=tuple(self._counts),
            prompt_rows=1 << (rows - 1).bit_length() if rows else 0,
            late=self.late,
            wait=self.wait,
            floor=self.floor,
        )
        self.guess = guess = self._guesser.guess(situation)
        self._prompt_rate = rows / guess.seconds
        soonest = self._prompt_left / self._prompt_rate if rows else NEVER
        self._active = []
        for level, rate in zip(self._levels, guess.rates, strict=True):
            if rate:
                level.rate = rate
                self._active.append(level)
                soonest = min(soonest, (level.marks[0][0] - level.progress) / rate)
        self.next_at = self._now + max(soonest, LEAST_SECONDS)
