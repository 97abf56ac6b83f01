"""Grammars that would take for ever are refused, and cost nobody else more than a moment."""

import gc
import json
import threading
import time

import pytest

from cluster.errors import InvalidRequest, Unavailable
from cluster.grammar.compiler import check_grammar
from cluster.grammar.trial import TOO_DEAR, Trial
from cluster.request import Grammar, GrammarKind
from cluster.text.tokenizer import Tokenizer

DEAR = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "allOf": [
                {"type": "string", "pattern": f"^.*(a{{{length}}}|b.{{{length}}}).*$"}
                for length in range(1, 40)
            ]
        }
    ),
)
GOOD = Grammar(GrammarKind.REGEX, "[a-z]+")
WRONG = Grammar(GrammarKind.REGEX, "(")


@pytest.fixture(scope="module")
def trial(tokenizer: Tokenizer) -> Trial:
    """One helper for the module."""
    return Trial(tokenizer.vocabulary)


def test_verdicts_are_those_of_the_compiler(trial: Trial, tokenizer: Tokenizer) -> None:
    """Nothing for what can be followed, field and problem for what cannot."""
    assert trial.verdict(GOOD) is None
    verdict = trial.verdict(WRONG)
    with pytest.raises(InvalidRequest) as raised:
        check_grammar(WRONG, tokenizer)
    assert verdict == (raised.value.field, raised.value.problem)


def test_what_takes_for_ever_is_refused_and_what_comes_after_is_not(trial: Trial) -> None:
    """It is ended after its time; the second time nobody tries."""
    assert trial.verdict(DEAR) == ("grammar.json_schema", TOO_DEAR)
    begin = time.process_time()
    assert trial.verdict(DEAR) == ("grammar.json_schema", TOO_DEAR)
    assert time.process_time() - begin < 0.1
    assert trial.verdict(Grammar(GrammarKind.REGEX, "[0-9]+")) is None


def test_threads_may_ask_at_once(trial: Trial) -> None:
    """Each gets the verdict of its own grammar."""
    found: dict[int, object] = {}

    def ask(number: int) -> None:
        source = f"a{{{number}}}" if number % 2 else f"a{{{number}}}("
        found[number] = trial.verdict(Grammar(GrammarKind.REGEX, source))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] is None for number in range(20)] == [False, True] * 10


def test_a_helper_that_died_is_replaced(tokenizer: Tokenizer) -> None:
    """The request that finds it dead may be sent again; and nobody is left behind."""
    trial = Trial(tokenizer.vocabulary)
    assert trial.verdict(GOOD) is None
    first = trial._helper
    assert first is not None
    first.kill()
    first.wait()
    with pytest.raises(Unavailable):
        trial.verdict(WRONG)
    assert trial.verdict(WRONG) is not None
    second = trial._helper
    assert second is not None
    del trial
    gc.collect()
    assert second.poll() is not None
