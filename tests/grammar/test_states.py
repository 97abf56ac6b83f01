"""Masks for the rows of a step: drafts, preemption, failures."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from cluster.errors import GrammarFailed
from cluster.grammar import compiler as compiler_module
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.states import GrammarStates
from cluster.messages import SamplingSpec, SequenceRows
from cluster.request import Grammar
from cluster.text.tokenizer import Tokenizer
from tests.grammar.conftest import EOS_TOKEN_ID, VOCAB_SIZE
from tests.grammar.sources import GRAMMARS, json_schema, regex

PROMPT = (5, 9, 250)


def rows(
    grammar: Grammar | None,
    answer: Sequence[int],
    drafts: Sequence[int] = (),
    *,
    seq_id: int = 1,
    num_computed: int | None = None,
) -> SequenceRows:
    """A step of a sequence that has come so far in its answer."""
    token_ids = (*PROMPT, *answer)
    start = len(token_ids) - 1 if num_computed is None else num_computed
    return SequenceRows(
        seq_id=seq_id,
        block_table=(0,),
        start=start,
        token_ids=(*token_ids[start:], *drafts),
        num_drafts=len(drafts),
        sampling=SamplingSpec(seed=1, num_prompt_tokens=len(PROMPT)),
        grammar=grammar,
        history_token_ids=token_ids[:start],
    )


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
def test_each_row_sees_the_drafts_before_it_and_nothing_else(
    grammar: Grammar, compiler: GrammarCompiler, data: st.DataObject
) -> None:
    """Row i is what a fresh matcher allows after the answer and i drafts, while those are taken.

    Whether the state was kept, dropped for another sequence's, or the sequence computed anew from
    its prompt after a preemption. After a refused draft all is allowed.
    """
    states = GrammarStates(lambda: compiler, max_states=1)
    answer: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans(), label="another sequence comes between"):
            states.masks(rows(GRAMMARS[0], (), seq_id=2))
        drafts: list[int] = []
        expected = []
        fresh = compiler.matcher(grammar)
        assert fresh.follow(answer) == len(answer)
        taken = True
        for place in range(data.draw(st.integers(0, 4), label="drafts") + 1):
            allowed = fresh.allowed() if taken else np.ones(VOCAB_SIZE, dtype=bool)
            expected.append(allowed)
            choices = np.flatnonzero(allowed)
            right = data.draw(st.integers(0, 4)) > 0
            draft = choices[data.draw(st.integers(0, len(choices) - 1))] if right else place
            drafts.append(int(draft))
            taken = taken and fresh.take(drafts[-1])
        preempted = data.draw(st.booleans(), label="computed anew")
        masks = states.masks(
            rows(grammar, answer, drafts[:-1], num_computed=0 if preempted else None)
        )
        assert masks is not None
        assert np.array_equal(masks.numpy(), np.stack(expected))
        num_kept = data.draw(st.integers(0, len(expected)), label="emitted")
        for draft, allowed in zip(drafts[:num_kept], expected[:num_kept], strict=True):
            if not allowed[draft] or not compiler_takes(compiler, grammar, [*answer, draft]):
                break
            answer.append(draft)


def compiler_takes(compiler: GrammarCompiler, grammar: Grammar, answer: Sequence[int]) -> bool:
    """Whether an answer may begin so."""
    return compiler.matcher(grammar).follow(answer) == len(answer)


def test_nothing_is_loaded_before_the_first_grammar() -> None:
    """Sequences without a grammar, and chunks that are not sampled, cost nothing."""

    def fail() -> GrammarCompiler:
        raise AssertionError

    assert GrammarStates(fail).masks(rows(None, ())) is None


def test_an_answer_that_broke_its_grammar_cannot_go_on(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """As when an answer is continued with another grammar: an error, for that sequence alone."""
    states = GrammarStates(lambda: compiler)
    answer = tokenizer.encode("red or")
    with pytest.raises(GrammarFailed, match="does not match"):
        states.masks(rows(regex("red and green"), answer))
    assert states.masks(rows(regex("red or green"), answer)) is not None
    assert states.masks(rows(regex("red or green"), answer, seq_id=2)) is not None


def test_a_grammar_that_nobody_checked_fails_its_sequence(compiler: GrammarCompiler) -> None:
    """An engine that is used without a gateway answers the same for its request alone."""
    states = GrammarStates(lambda: compiler)
    with pytest.raises(GrammarFailed, match=r"grammar\.json_schema: Invalid type"):
        states.masks(rows(json_schema({"type": "text"}), ()))


WORN_OUT = regex("(a|b)*a(a|b){9}c")  # every prefix is another state of its lexer


def limited(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, limit: int) -> GrammarStates:
    """States whose matchers give up after that many states of their lexer."""
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=limit))
    return GrammarStates(lambda: GrammarCompiler(tokenizer.vocabulary))


def test_what_drafts_wore_out_is_begun_anew(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library gives up on a draft nothing is allowed, which ends the run there.

    The rows before are what they always are, and so is the next step: drafts fail no sequence.
    """
    unlimited = GrammarStates(lambda: GrammarCompiler(tokenizer.vocabulary))
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    drafts = [a, b, a, a, b, a, b, b, a, b, a, a, a, b, b, a] * 2
    expected = unlimited.masks(rows(WORN_OUT, (), drafts))
    states = limited(tokenizer, monkeypatch, 60)
    masks = states.masks(rows(WORN_OUT, (), drafts))
    assert masks is not None
    assert expected is not None
    num_known = int(masks.any(-1).sum())
    assert 0 < num_known < len(drafts)
    assert masks[:num_known].equal(expected[:num_known])
    going_on = states.masks(rows(WORN_OUT, drafts[:num_known]))
    assert going_on is not None
    assert going_on[0].equal(expected[num_known])


def test_a_grammar_too_complex_to_follow_fails_its_sequence(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gives up from the beginning too: an error, not some mask."""
    states = limited(tokenizer, monkeypatch, 14)
    answer = [tokenizer.encode("a")[0], tokenizer.encode("b")[0]] * 8
    with pytest.raises(GrammarFailed, match="cannot be followed"):
        states.masks(rows(WORN_OUT, answer))


def test_eos_is_in_every_row_where_the_text_is_whole(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """EOS as a draft is followed like any other token."""
    states = GrammarStates(lambda: compiler)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    masks = states.masks(rows(regex("a|ab"), (), (a, b, EOS_TOKEN_ID)))
    assert masks is not None
    assert masks[:, EOS_TOKEN_ID].tolist() == [False, True, True, True]
    assert masks[2:].sum(-1).tolist() == [1, 1]
