"""The one thread that a draft model lives in: answers come first, drafting ahead fills the rest.

asleep ──something to do──> does it, first come first served ──nothing left──> advances
   ^                                      ^                                      │    │
   │                                      └──────────something to do─────────────┘    │
   └───────────────────────────nothing left to advance────────────────────────────────┘

So whoever comes waits for at most one forward pass of the model's own accord.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Protocol, TypeVar

from cluster.messages import ExchangeInput, ExchangeOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_SECONDS = 0.001  # after an answer: whoever sends it needs the interpreter


class Exchanges(Protocol):
    """What drafts: a DraftModel. Used by one thread."""

    @property
    def context_limit(self) -> int:
        """Tokens of context and draft together that fit."""
        ...

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Drafts for a message; blocks for as long as they take."""
        ...

    def advance(self) -> bool:
        """Draft a little ahead; returns whether there was anything to do."""
        ...


class ExchangeThread(Protocol):
    """Where a draft model computes."""

    def exchange(self, message: ExchangeInput) -> Future[ExchangeOutput]:
        """What the model answers, or the error it raised."""
        ...

    def close(self) -> None:
        """Compute no more for it."""
        ...


class DraftThread:
    """Runs a draft model's exchanges in the order they come, and its `advance` between them.

    Without `run_ahead` it only answers, and sleeps in between. An error while it drafts ahead ends
    that, and is raised by the next exchange.
    """

    def __init__(self, model: Exchanges, *, run_ahead: bool) -> None:
        self._model = model
        self._run_ahead = run_ahead
        self._changed = Condition()
        self._work: deque[Callable[[], object]] = deque()
        self._has_more = False  # to advance
        self._failure: Exception | None = None
        self._closed = False
        self._just_answered = False
        self.busy_seconds = 0.0  # since it began
        self._thread = Thread(target=self._run, name="drafter", daemon=True)
        self._thread.start()

    def exchange(self, message: ExchangeInput) -> Future[ExchangeOutput]:
        """What the model answers, or the error it or drafting ahead raised."""

        def answer() -> ExchangeOutput:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._has_more = self._run_ahead
            self._just_answered = True
            return self._model.exchange(message)

        return self.submit(answer)

    def submit(self, compute: Callable[[], T]) -> Future[T]:
        """Run something in this thread after all that was given before.

        Raises RuntimeError once closed.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the draft thread is closed")
            self._work.append(lambda: _settle(future, compute))
            self._changed.notify()
        return future

    def change(self, model_change: Callable[[], T]) -> Future[T]:
        """Change the model between two exchanges; it may then have something to do ahead."""

        def change() -> T:
            result = model_change()
            self._has_more = self._run_ahead
            return result

        return self.submit(change)

    def close(self) -> None:
        """End the thread, after all it was given. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            begin = time.perf_counter()
            work()
            self.busy_seconds += time.perf_counter() - begin

    def _next(self) -> Callable[[], object] | None:
        """What to do now, waited for; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._has_more or self._closed)
            if self._just_answered:
                self._just_answered = False
                self._changed.wait_for(lambda: self._work or self._closed, timeout=PAUSE_SECONDS)
            if self._work:
                return self._work.popleft()
            return None if self._closed else self._advance

    def _advance(self) -> None:
        try:
            self._has_more = self._model.advance()
        except Exception as error:
            logger.exception("drafting ahead failed")
            self._failure = error
            self._has_more = False


def _settle(future: Future[T], compute: Callable[[], T]) -> None:
    """Give a future its result or error, unless nobody wants it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(compute())
    except BaseException as error:  # noqa: BLE001 - it is raised to whoever asked
        future.set_exception(error)
