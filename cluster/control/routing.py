"""Which engine is to take a request: the one that should be done with it first.

An engine's load tells how long it will take: the request waits for a place, then for the prompts
before it, then its own prompt is computed as far as it is not cached, then its tokens come. So a
conversation goes back to the engine that holds it, until the queue there costs more than the
prompt. Everything is worked out from what is known here: nobody is asked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil

from cluster.errors import Overloaded, TargetUnavailable
from cluster.messages import EngineLoad
from cluster.prefixes import DIGEST_TOKENS, prefix_digests
from cluster.request import Request

UNKNOWN_STEP_SECONDS = 0.02  # of an engine that has not told
UNKNOWN_ANSWER_TOKENS = 128.0
FEW_BLOCKS = 0.1  # of all: with so few free, memory and not places is what is waited for
LEAST_RETRY_SECONDS = 0.1
MOST_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An engine as it last described itself, and what was sent to it from here since."""

    engine_id: str
    load: EngineLoad
    prefixes: frozenset[int] = frozenset()
    num_sent: int = 0
    sent_tokens: int = 0  # of the prompts that were sent

    @property
    def num_held(self) -> int:
        """Sequences that run or wait there."""
        return self.load.running + self.load.waiting + self.num_sent

    @property
    def num_waiting(self) -> int:
        """Sequences beyond those that have a place, as the engine's own bound counts them."""
        return max(self.num_held - self.load.max_num_seqs, 0)

    @property
    def is_full(self) -> bool:
        """Whether the engine would turn another away."""
        limit = self.load.max_num_waiting
        return limit > 0 and self.num_waiting >= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request takes. `digests` are those of its tokens so far, shortest prefix first."""

    num_tokens: int
    digests: tuple[int, ...] = ()
    max_tokens: int | None = None  # still to come
    least_tokens: int = 0  # of them, that certainly are
    deadline_seconds: float | None = None  # from now


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now: until a place is free, until it is its turn, and to the last token.

    `least_seconds` are to the end of the shortest answer there can be, and `alone_seconds` to the
    last token if the engine had nothing else to do. It `is_guess` while no steps were seen.
    """

    place_seconds: float
    turn_seconds: float
    least_seconds: float
    last_seconds: float
    alone_seconds: float
    is_guess: bool = False

    def in_time(self, deadline_seconds: float) -> bool:
        """Whether the answer should be there by then; so it is while nothing is known of steps.

        Where it should not be on an idle engine either it may be a short one, which only its
        client can know: then the shortest that there can be decides.
        """
        if self.is_guess:
            return self.place_seconds == 0
        if self.alone_seconds <= deadline_seconds:
            return self.last_seconds <= deadline_seconds
        return self.least_seconds <= deadline_seconds


def need_of(request: Request) -> Need:
    """What a request, perhaps one that begun elsewhere, takes."""
    token_ids = (*request.prompt_token_ids, *request.output_token_ids)
    stopping, begun = request.stopping, len(request.output_token_ids)
    ends_early = stopping.stop or stopping.stop_token_ids or request.grammar
    least = stopping.min_tokens
    if stopping.ignore_eos and stopping.max_tokens is not None and not ends_early:
        least = stopping.max_tokens
    return Need(
        num_tokens=len(token_ids),
        digests=prefix_digests(token_ids, salt=request.cache_salt),
        max_tokens=None if stopping.max_tokens is None else stopping.max_tokens - begun,
        least_tokens=max(least - begun, 0),
        deadline_seconds=request.deadline_seconds,
    )


def num_cached(standing: Standing, need: Need) -> int:
    """Tokens of the request that the engine need not compute; never the last one."""
    count = 0
    for digest in need.digests:
        if digest not in standing.prefixes:
            break
        count += 1
    return min(count * DIGEST_TOKENS, need.num_tokens - 1)


def estimate(standing: Standing, need: Need) -> Estimate:
    """When a request would be served there, if nothing else came."""
    load = standing.load
    ahead = standing.num_held
    places = _places(load)
    token_seconds = _token_seconds(load, min(ahead + 1, places))
    usual_tokens = load.answer_tokens or UNKNOWN_ANSWER_TOKENS
    place_seconds = max(ahead + 1 - places, 0) * usual_tokens * token_seconds / places
    tokens_ahead = load.prompt_tokens + standing.sent_tokens
    own_rows = _prompt_rows(load, need.num_tokens, num_cached(standing, need))
    beside = min(ahead, places)
    first_seconds = place_seconds + _prompt_seconds(load, beside, tokens_ahead + own_rows)
    answer_tokens = max(usual_tokens, need.least_tokens)
    if need.max_tokens is not None:
        answer_tokens = min(answer_tokens, need.max_tokens)
    return Estimate(
        place_seconds=place_seconds,
        turn_seconds=place_seconds + _prompt_seconds(load, beside, tokens_ahead),
        least_seconds=first_seconds + need.least_tokens * token_seconds,
        last_seconds=first_seconds + answer_tokens * token_seconds,
        alone_seconds=_prompt_seconds(load, 0, own_rows) + answer_tokens * _token_seconds(load, 1),
        is_guess=not (load.base_seconds or load.row_seconds),
    )


def choose(standings: Iterable[Standing], need: Need) -> Standing:
    """The engine that should be done first; of equal ones always the same for the same prefix.

    Raises TargetUnavailable when there is none, and Overloaded, with the seconds after which
    another try may do, when all are full or none is expected to be done before the deadline.
    """
    known = list(standings)
    if not known:
        raise TargetUnavailable("no target is ready")
    open_to = [standing for standing in known if not standing.is_full]
    if not open_to:
        raise _full(known)
    expected = [(standing, estimate(standing, need)) for standing in open_to]
    best, when = min(expected, key=lambda each: (each[1].last_seconds, *_tie(each[0], need)))
    if need.deadline_seconds is None or when.in_time(need.deadline_seconds):
        return best
    raise Overloaded(
        waiting=best.num_waiting,
        limit=best.load.max_num_waiting,
        retry_seconds=_retry(when.last_seconds - need.deadline_seconds),
        wait_seconds=when.last_seconds,
        deadline_seconds=need.deadline_seconds,
    )


@dataclass(slots=True)
class Sent:
    """What was sent to an engine and is not yet in what it tells of itself.

    `expect` before a request goes out, `taken` when the engine has it, `told` when a load comes
    that was made after that; `forget` one that did not get there.
    """

    _open: dict[str, int] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def expect(self, request_id: str, num_tokens: int) -> None:
        """A request of so many tokens is on its way."""
        self._open[request_id] = num_tokens

    def taken(self, request_id: str) -> None:
        """The engine counts it from now on."""
        if request_id in self._open:
            self._taken.add(request_id)

    def told(self) -> None:
        """The engine has told of its load."""
        for request_id in self._taken:
            self._open.pop(request_id, None)
        self._taken.clear()

    def forget(self, request_id: str) -> None:
        """It is none of the engine's."""
        self._open.pop(request_id, None)
        self._taken.discard(request_id)

    @property
    def num_sequences(self) -> int:
        """How many."""
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return sum(self._open.values())


def _places(load: EngineLoad) -> int:
    """Sequences that can run at once: places, or as many as the memory is seen to hold."""
    if load.waiting and load.running and load.free_blocks < FEW_BLOCKS * load.num_blocks:
        return min(load.running, load.max_num_seqs)
    return load.max_num_seqs


def _step_seconds(load: EngineLoad, num_rows: float) -> float:
    return load.base_seconds + num_rows * load.row_seconds or UNKNOWN_STEP_SECONDS


def _token_seconds(load: EngineLoad, num_sequences: int) -> float:
    """Until the next token of each of so many."""
    return _step_seconds(load, num_sequences) / (load.tokens_per_step or 1.0)


def _prompt_rows(load: EngineLoad, num_tokens: int, num_cached: int) -> float:
    """What a prompt costs, in rows that look back on nothing."""
    own = num_tokens - num_cached
    return own * (1 + (num_cached + (own - 1) / 2) / load.keys_per_row)


def _prompt_seconds(load: EngineLoad, num_running: int, num_rows: float) -> float:
    """How long so many rows of prompts take, beside so many sequences that decode."""
    most = min(load.max_prompt_rows, load.max_num_batched_tokens)
    if not num_running:
        most = load.max_num_batched_tokens
    return ceil(num_rows / most) * _step_seconds(load, num_running + min(most, num_rows))


def _full(standings: Sequence[Standing]) -> Overloaded:
    """All are full: the first of them that should have room in its queue, and when."""
    alone = Need(num_tokens=1)

    def room_seconds(standing: Standing) -> float:
        a_place = estimate(standing, alone).place_seconds / (standing.num_waiting + 1)
        return a_place * (standing.num_waiting - standing.load.max_num_waiting + 1)

    soonest = min(standings, key=lambda each: (room_seconds(each), each.engine_id))
    return Overloaded(
        waiting=soonest.num_waiting,
        limit=soonest.load.max_num_waiting,
        retry_seconds=_retry(room_seconds(soonest)),
    )


def _retry(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)


def _tie(standing: Standing, need: Need) -> tuple[int, bytes]:
    """The fewest sequences, then an order that is every gateway's, and another for each prefix."""
    key = f"{need.digests[:1]}{standing.engine_id}".encode()
    return standing.num_held, blake2b(key, digest_size=8).digest()
