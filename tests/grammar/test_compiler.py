"""Which grammars are taken, and how the others are refused."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cluster.errors import InvalidRequest
from cluster.grammar import compiler as compiler_module
from cluster.grammar.compiler import GrammarCompiler, check_grammar
from cluster.request import Grammar, GrammarKind
from cluster.text.tokenizer import Tokenizer
from tests.grammar.sources import GRAMMARS, json_schema, lark, regex

LARGE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(300)},
    "required": [f"field_{i}" for i in range(0, 300, 2)],
}


@pytest.mark.parametrize("grammar", [*GRAMMARS, json_schema(LARGE)], ids=range(len(GRAMMARS) + 1))
def test_grammars_that_can_be_followed_pass(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Every kind is taken, and what is large but not absurd."""
    check_grammar(grammar, tokenizer)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, ""), "is not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "is not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"minimum": NaN}'), "is not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": [1e999]}'), "is not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 60_000), "nested too deeply"),
        (json_schema([1]), "is not a JSON object"),
        (json_schema(schema=False), "is not a JSON object"),
        (json_schema({"type": "text"}), "Invalid type: text"),
        (json_schema({"$ref": "#"}), "cannot be followed"),
        (json_schema({"$ref": "https://example.com/schema.json"}), "not present"),
        (json_schema({"type": "integer", "minimum": 5, "maximum": 1}), "Unsatisfiable"),
        (json_schema({"const": "x" * 70_000}), "bytes are more than 65536"),
        (json_schema({"properties": {f"{i}": {"$ref": "#"} for i in range(2500)}}), "too big"),
        (regex("a("), "unclosed group"),
        (regex("a\\"), "ends in an escape"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("a\ud800"), "is not Unicode"),
        (lark(""), "no start rule"),
        (lark("start: word"), "unknown name"),
        (lark("start: start"), "cannot be followed"),
        (lark("start: " + "(" * 8000), "nested"),
        (lark("x" * 20_000), "bytes are more than 16384"),
    ],
)
def test_malformed_and_hopeless_grammars_are_refused(
    grammar: Grammar, problem: str, tokenizer: Tokenizer
) -> None:
    """The error names the field, says why in a sentence, and does not repeat the source."""
    with pytest.raises(InvalidRequest, match=problem) as raised:
        check_grammar(grammar, tokenizer)
    assert raised.value.field == f"grammar.{grammar.kind}"
    assert len(raised.value.problem) <= 400


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {}, "uniqueItems": True},
        {"not": {"type": "string"}},
        {"type": "string", "format": "no such format"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused(schema: object, tokenizer: Tokenizer) -> None:
    """Exact or refused: no constraint is left out, not even when the schema asks for it."""
    with pytest.raises(InvalidRequest):
        check_grammar(json_schema(schema), tokenizer)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("start: a\na[max_tokens=3]: /b+/", "max_tokens"),
        ('start: a "."\na[lazy, stop="x"]: /b+/', "stop"),
        ('start: "a" <[1-200]>', "reference to a token"),
        ('start: <|im_end|> "a"', "reference to a token"),
    ],
)
def test_what_cannot_be_rolled_back_or_is_not_text_is_refused(
    source: str, problem: str, tokenizer: Tokenizer
) -> None:
    """A grammar is about text alone, and depends on nothing but the text."""
    with pytest.raises(InvalidRequest, match=problem):
        check_grammar(lark(source), tokenizer)


DEEP = """
import sys, threading
from cluster.grammar import compiler
from cluster.grammar.compiler import GrammarCompiler
from cluster.request import Grammar, GrammarKind
from cluster.text.decoding import ByteLevelDecoding
from cluster.text.detokenizer import Vocabulary

def check():
    vocabulary = Vocabulary(("x", "["), frozenset(), ByteLevelDecoding())
    rules = "".join(f"a{i:x}:a{i + 1:x}\\n" for i in range(1500)) + 'a5dc:"x"'
    items = ",".join(f'"{i:x}":{{"items":{{"$ref":"#/x/{i + 1:x}"}}}}' for i in range(900))
    schema = f'{{"x":{{{items},"384":{{}}}},"$ref":"#/x/0","type":"array"}}'
    compiler = GrammarCompiler(vocabulary)
    compiler.check(Grammar(GrammarKind.LARK, "start: a0\\n" + rules))
    compiler.check(Grammar(GrammarKind.JSON_SCHEMA, schema))
    print("checked")

compiler.STACK_BYTES = int(sys.argv[1])
threading.stack_size(512 * 1024)  # what some systems give every thread
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""


def test_grammars_as_deep_as_they_are_long_do_not_end_the_process() -> None:
    """The parser recurses for each rule of a chain: its stack is deep enough for any."""
    overflow, deep = (
        subprocess.run(
            [sys.executable, "-c", DEEP, str(num_bytes)],
            capture_output=True,
            text=True,
            check=False,
        )
        for num_bytes in (512 * 1024, compiler_module.STACK_BYTES)
    )
    assert overflow.returncode < 0
    assert (deep.returncode, deep.stdout.strip()) == (0, "checked"), deep.stderr


def test_compiled_grammars_are_kept_but_not_without_bound(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is used again is not compiled again; the one longest unused is dropped."""
    monkeypatch.setattr(compiler_module, "MAX_COMPILED", 2)
    compiler = GrammarCompiler(tokenizer.vocabulary)
    compiled: list[Grammar] = []
    compile_ = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda it: (compiled.append(it), compile_(it))[1])
    first, second, third = regex("a"), regex("b"), regex("c")
    for grammar in (first, second, first, third, first, second):
        compiler.matcher(grammar)
    assert compiled == [first, second, third, second]


def test_one_compiler_serves_many_threads(compiler: GrammarCompiler) -> None:
    """What is allowed first is the same for all, though all compile and check at once."""
    expected = [compiler.matcher(grammar).allowed() for grammar in GRAMMARS]
    for grammar in GRAMMARS:
        compiler.forget(grammar)
    asked = [*range(len(GRAMMARS))] * 8
    with ThreadPoolExecutor(max_workers=8) as threads:
        found = threads.map(lambda place: compiler.matcher(GRAMMARS[place]).allowed(), asked)
        for place, allowed in zip(asked, found, strict=True):
            assert np.array_equal(allowed, expected[place])
