"""Grammars are tried in a process of their own first, within a time and a memory.

There are short grammars whose compiling takes hours (intersections of patterns, for one), and no
thread can be ended. So a helper that knows the vocabulary forks for every grammar, and the fork
dies of what it may not use up.

gateway ── grammar ──> helper ── fork ──> check, limited
        <── verdict ──        <── verdict, or none
"""

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any

from cluster.errors import InvalidRequest, Unavailable
from cluster.grammar.compiler import GrammarCompiler
from cluster.request import Grammar
from cluster.text.detokenizer import Vocabulary
from cluster.text.tokenizer import Tokenizer

CPU_SECONDS = 2  # ten times what sources of the allowed length should take
WALL_SECONDS = 20  # the machine may be busy
MEMORY_BYTES = 4 * 2**30  # of addresses; a deep stack takes some
MAX_VERDICTS = 1024
TOO_DEAR = f"takes more than {CPU_SECONDS} s to compile"
LENGTH_BYTES = 8

Verdict = tuple[str, str] | None  # field and problem of an InvalidRequest


def try_grammar(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Raises InvalidRequest, naming the grammar's field, where it cannot be followed.

    Takes milliseconds, the first time a second, and never much more than CPU_SECONDS of a core:
    not for an event loop. Raises Unavailable when the helper is gone; there is another next time.
    """
    verdict = _trial(tokenizer).verdict(grammar)
    if verdict is not None:
        raise InvalidRequest(*verdict)


@lru_cache(maxsize=2)
def _trial(tokenizer: Tokenizer) -> "Trial":
    return Trial(tokenizer.vocabulary)


class Trial:
    """Keeps the helper of one vocabulary, and the last verdicts. Safe to use from threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._verdicts: OrderedDict[Grammar, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None

    def verdict(self, grammar: Grammar) -> Verdict:
        """What is wrong with it, if anything. Raises Unavailable."""
        with self._lock:
            if grammar not in self._verdicts:
                self._verdicts[grammar] = self._ask(grammar)
                while len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(grammar)
            return self._verdicts[grammar]

    def _ask(self, grammar: Grammar) -> Verdict:
        helper = self._helper or self._start()
        assert helper.stdin is not None
        assert helper.stdout is not None
        try:
            send(helper.stdin, grammar)
            verdict: Verdict = receive(helper.stdout)
        except (OSError, EOFError) as error:
            self._helper = None
            _end(helper)
            raise Unavailable("grammars cannot be checked now") from error
        return verdict

    def _start(self) -> subprocess.Popen[bytes]:
        """The helper, which ends when this process does, or forgets it."""
        helper = subprocess.Popen(
            [sys.executable, "-m", "cluster.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        weakref.finalize(self, _end, helper)
        self._helper = helper
        assert helper.stdin is not None
        send(helper.stdin, self._vocabulary)
        return helper


def _end(helper: subprocess.Popen[bytes]) -> None:
    helper.kill()
    for stream in (helper.stdin, helper.stdout):
        if stream is not None:
            with suppress(OSError):  # what was not sent yet has no reader
                stream.close()
    helper.wait()


def send(stream: IO[bytes], what: object) -> None:
    """Write an object as its length and its bytes."""
    data = pickle.dumps(what)
    stream.write(len(data).to_bytes(LENGTH_BYTES) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:  # noqa: ANN401 - whatever was sent
    """Read an object. Raises EOFError at the end of the stream."""
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(length)))  # noqa: S301 - both ends are ours


def main() -> None:
    """The helper: verdicts on grammars, until nobody asks any more."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    compiler = GrammarCompiler(receive(source))
    while True:
        try:
            grammar: Grammar = receive(source)
        except EOFError:
            return
        send(sink, _in_fork(compiler, grammar))


def _in_fork(compiler: GrammarCompiler, grammar: Grammar) -> Verdict:
    """The verdict of a process that is limited, and dies of reaching a limit."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(WALL_SECONDS)
        with os.fdopen(writing, "wb") as result:
            send(result, _verdict(compiler, grammar))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as result:
        try:
            verdict: Verdict = receive(result)
        except EOFError:
            verdict = f"grammar.{grammar.kind}", TOO_DEAR
    os.waitpid(child, 0)
    return verdict


def _verdict(compiler: GrammarCompiler, grammar: Grammar) -> Verdict:
    try:
        compiler.check(grammar)
    except InvalidRequest as error:
        return error.field, error.problem
    return None


if __name__ == "__main__":
    main()
