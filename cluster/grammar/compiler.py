"""Grammars for one model's vocabulary, compiled by llguidance.

What a grammar says is said of text: every way to write an allowed text in tokens is allowed.

json_schema  a JSON Schema. A keyword that cannot be enforced is refused, not skipped. Between the
             parts of the JSON stands nothing, one space, or one line break with at most sixteen
             spaces after it; nothing stands before or after the whole.
regex        Rust's syntax, matched against the whole text: no look-around, no back references.
lark         llguidance's dialect of Lark, without `max_tokens` and `stop` (they cannot be rolled
             back) and without references to tokens.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NoReturn, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from cluster.errors import GrammarFailed, InvalidRequest
from cluster.grammar.matcher import Matcher
from cluster.grammar.pieces import pieces
from cluster.request import Grammar, GrammarKind
from cluster.text.detokenizer import Vocabulary
from cluster.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_SOURCE_BYTES = {
    GrammarKind.JSON_SCHEMA: 64 * 1024,
    GrammarKind.REGEX: 64 * 1024,
    GrammarKind.LARK: 16 * 1024,  # malformed ones take a time that grows with the square
}
MAX_COMPILED = 64  # grammars kept
MAX_PROBLEM_LENGTH = 300  # characters of the library's explanation that are passed on
WHITE_SPACE = r"( |\n {0,16})"
# Without this only one tokenisation of a forced text would be allowed.
EVERY_TOKENISATION = '\n%llguidance {"no_forcing": true}\n'
# Grammars recurse as deep as they are long, and an overflow would end the process. Only what is
# used of it takes memory.
STACK_BYTES = 256 * 2**20
# What a source of the allowed length may cost: some 0.3 s to compile, 50 MB to follow.
LIMITS = LLParserLimits(max_grammar_size=20_000, max_lexer_states=50_000, verbose_errors=False)
UNSUPPORTED_LARK = re.compile(r"\[[^\]\n]*\b(max_tokens|stop|temperature)\b|<\[|<\|")

_stack_size = threading.Lock()


class GrammarCompiler:
    """Compiles grammars and keeps those used last. Safe to use from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size` is that of the model, where it has more rows than there are tokens."""
        self.vocab_size = vocab_size or len(vocabulary.tokens)
        self._eos_token_ids = eos_token_ids
        tokens = pieces(vocabulary, self.vocab_size, left_out=eos_token_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_TokenBytes(tokens)))
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's beginning. Raises InvalidRequest naming the grammar's field.

        Compiling what was not used lately takes milliseconds, for huge ones tenths of a second.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            copy = compiled.deep_copy()
        return Matcher(copy, vocab_size=self.vocab_size, eos_token_ids=self._eos_token_ids)

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew the next time."""
        with self._lock:
            self._compiled.pop(grammar, None)

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest if no answer can be begun, or what is asked for is not served."""
        try:
            allowed = self.matcher(grammar).allowed()
            possible = bool(allowed.any()) or self.matcher(grammar).may_end
        except GrammarFailed as error:
            _refuse(grammar, str(error))
        if not possible:
            _refuse(grammar, "no text matches")

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = _lark(grammar)
        text = json.dumps({"grammars": [{"lark_grammar": source}]})
        compiled = _on_deep_stack(
            lambda: LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        )
        if compiled.is_error():
            _refuse(grammar, _explanation(compiled.get_error()))
        return compiled


def check_grammar(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Raises InvalidRequest, naming the grammar's field, where it cannot be followed.

    Takes milliseconds, the first time and for huge ones up to a second: not for an event loop.
    """
    _compiler(tokenizer).check(grammar)


@lru_cache(maxsize=2)
def _compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.vocabulary)


class _TokenBytes:
    """A vocabulary as llguidance takes one. Its EOS is an id of its own after all others."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)

    def __call__(self, text: bytes | str) -> list[int]:
        """How a text is tokenised, which only forced text would need to know."""
        raise NotImplementedError(text)


def _lark(grammar: Grammar) -> str:
    """Any grammar as a Lark one. Raises InvalidRequest."""
    limit = MAX_SOURCE_BYTES[grammar.kind]
    try:
        num_bytes = len(grammar.source.encode())
    except UnicodeEncodeError:
        _refuse(grammar, "is not Unicode text")
    if num_bytes > limit:
        _refuse(grammar, f"{num_bytes} bytes are more than {limit}")
    return _WRITERS[grammar.kind](grammar) + EVERY_TOKENISATION


def _json_schema(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.source, parse_constant=_refuse_constant)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            _refuse(grammar, "is not a JSON object")
        options = {"whitespace_pattern": WHITE_SPACE}
        return "start: %json " + json.dumps(schema | {"x-guidance": options}, allow_nan=False)
    except RecursionError:
        _refuse(grammar, "is nested too deeply")
    except ValueError as error:
        _refuse(grammar, f"is not JSON: {error}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _regex(grammar: Grammar) -> str:
    source = grammar.source
    if (len(source) - len(source.rstrip("\\"))) % 2:
        _refuse(grammar, "ends in an escape")  # it would escape the delimiter
    return f"start: /{regex_to_lark(source or '(?:)', '')}/"


def _own_lark(grammar: Grammar) -> str:
    if match := UNSUPPORTED_LARK.search(grammar.source):
        _refuse(grammar, f"{match[1] or 'a reference to a token'} is not supported")
    return grammar.source


_WRITERS: dict[GrammarKind, Callable[[Grammar], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: _regex,
    GrammarKind.LARK: _own_lark,
}


def _refuse(grammar: Grammar, problem: str) -> NoReturn:
    raise InvalidRequest(f"grammar.{grammar.kind}", problem)


def _explanation(error: str) -> str:
    """The library's words without the listing of the source it shows."""
    lines = [line for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    reasons = [line for line in lines if line.startswith("error: ")] or lines
    reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", reasons[0])
    return reason.removeprefix("error: ")[:MAX_PROBLEM_LENGTH]


def _on_deep_stack(compute: Callable[[], T]) -> T:
    """Compute in a thread with a stack of STACK_BYTES."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        with _stack_size:
            usual = threading.stack_size(STACK_BYTES)
            try:
                done = thread.submit(compute)  # which starts the thread
            finally:
                threading.stack_size(usual)
        return done.result()
