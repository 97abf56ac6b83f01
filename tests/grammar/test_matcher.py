"""What may follow, compared with languages small enough to be written out."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.grammar.compiler import WHITE_SPACE, GrammarCompiler
from cluster.grammar.pieces import pieces
from cluster.request import Grammar
from cluster.text.tokenizer import Tokenizer
from tests.grammar.conftest import EOS_TOKEN_ID, VOCAB_SIZE
from tests.grammar.sources import GRAMMARS, json_schema, lark, regex

DIGITS = "0123"
GAPS = ["", " ", *(f"\n{' ' * width}" for width in range(17))]
LANGUAGES = {
    regex("(red|green|reed)-[0-3]{1,2}!?"): {
        f"{word}-{first}{second}{mark}"
        for word in ("red", "green", "reed")
        for first in DIGITS
        for second in ("", *DIGITS)
        for mark in ("", "!")
    },
    regex("é|ê|日本|日"): {"é", "ê", "日本", "日"},
    json_schema({"enum": ["the", "then", 12, 1, None, True]}): {
        json.dumps(value) for value in ("the", "then", 12, 1, None, True)
    },
    json_schema({"const": {"a": True}}): {
        "".join(parts)
        for parts in itertools.product("{", GAPS, ['"a"'], GAPS, ":", GAPS, ["true"], GAPS, "}")
        if sum(map(len, parts)) < 15
    },
    lark('start: x ("," x)?\nx: "the" | "that"'): {
        ",".join(words) for n in (1, 2) for words in itertools.product(("the", "that"), repeat=n)
    },
}


@pytest.mark.parametrize("grammar", LANGUAGES, ids=lambda grammar: grammar.source[:20])
def test_exactly_the_tokens_that_lead_on_are_allowed(
    grammar: Grammar, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """After every prefix: a token is allowed if some text goes on so, EOS if the text is whole.

    (Of the schema with white space only the shorter texts are written out, so there only these
    tokens are asked for.)
    """
    language = {text.encode() for text in LANGUAGES[grammar]}
    prefixes = {text[:length] for text in language for length in range(len(text) + 1)}
    all_pieces = pieces(tokenizer.vocabulary, VOCAB_SIZE, left_out={EOS_TOKEN_ID})
    complete = "const" not in grammar.source
    for prefix in sorted(prefixes)[:400]:
        matcher = compiler.matcher(grammar)
        token_ids = [all_pieces.index(bytes([byte])) for byte in prefix]
        assert matcher.follow(token_ids) == len(token_ids)
        allowed = set(np.flatnonzero(matcher.allowed()).tolist())
        expected = {
            token_id
            for token_id, piece in enumerate(all_pieces)
            if piece and prefix + piece in prefixes
        } | ({EOS_TOKEN_ID} if prefix in language else set())
        assert allowed == expected if complete else allowed >= expected, prefix
        assert matcher.may_end == (prefix in language)


@pytest.mark.parametrize(
    ("text", "num_taken"),
    [
        ('{"a":1,"b":2}', 13),
        ('{"a": 1, "b": 2}', 16),
        ('{\n  "a": 1,\n  "b": 2\n}', 22),
        ('{  "a":1,"b":2}', 2),
        ('{\n\n"a":1,"b":2}', 2),
        ("{\n" + " " * 17 + '"a":1,"b":2}', 18),
        (' {"a":1,"b":2}', 0),
        ('\n{"a":1,"b":2}', 0),
        ('{"a":1,"b":2} ', 13),
        ('{"a":1,"b":2}\n', 13),
        ('{\t"a":1,"b":2}', 1),
    ],
)
def test_white_space_is_bounded(text: str, num_taken: int, compiler: GrammarCompiler) -> None:
    """Nothing, a space, or a line break with up to sixteen spaces; none around the whole."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    matcher = compiler.matcher(json_schema(schema))
    assert WHITE_SPACE == r"( |\n {0,16})"
    assert matcher.follow([token_of(byte, compiler) for byte in text.encode()]) == num_taken


def token_of(byte: int, compiler: GrammarCompiler) -> int:
    """The token that is this byte alone."""
    tokens = compiler._tokenizer
    return next(i for i in range(VOCAB_SIZE) if tokens.decode_bytes([i]) == bytes([byte]))


def test_only_text_is_ever_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Special tokens, the model's padding and bytes no text has are never allowed.

    Anything else is where any text is; EOS too, since the empty text is one.
    """
    allowed = compiler.matcher(regex(r"(.|\n)*")).allowed()
    never = {0xC0, 0xC1, *range(0x80, 0xC0), *range(0xF5, 0x100)}  # as the first byte
    for token_id in range(VOCAB_SIZE):
        token = tokenizer.vocabulary.token(token_id)
        piece = b"" if token is None else tokenizer.vocabulary.decoding.piece(token)
        possible = bool(piece) and piece[0] not in never
        assert allowed[token_id] == (possible or token_id == EOS_TOKEN_ID), (token_id, piece)


def test_after_eos_comes_nothing_but_eos(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """A request that ignores EOS gets more of it: the text stays whole. Before, it is refused."""
    matcher = compiler.matcher(regex("a"))
    (only,) = tokenizer.encode("a")
    assert not matcher.take(EOS_TOKEN_ID)
    assert matcher.follow([only, EOS_TOKEN_ID, EOS_TOKEN_ID]) == 3
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS_TOKEN_ID]
    assert not matcher.take(only)
    assert matcher.follow([only]) == 1
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS_TOKEN_ID]
    assert matcher.follow([]) == 0
    assert matcher.allowed()[only]


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
def test_a_matcher_that_went_back_is_as_one_that_never_went_there(
    grammar: Grammar, compiler: GrammarCompiler, data: st.DataObject
) -> None:
    """Whatever was followed before: what is allowed after a prefix depends on the prefix alone."""
    wandering = compiler.matcher(grammar)
    path: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        path = path[: data.draw(st.integers(0, len(path)))]
        for _ in range(data.draw(st.integers(0, 6))):
            assert wandering.follow(path) == len(path)
            choices = np.flatnonzero(wandering.allowed())
            path.append(int(choices[data.draw(st.integers(0, len(choices) - 1))]))
        if data.draw(st.booleans()):
            refused = data.draw(st.integers(0, VOCAB_SIZE + 1))
            wandering.follow([*path, refused])
        assert wandering.follow(path) == len(path)
        fresh = compiler.matcher(grammar)
        assert fresh.follow(path) == len(path)
        assert np.array_equal(wandering.allowed(), fresh.allowed())
        assert wandering.may_end == fresh.may_end
