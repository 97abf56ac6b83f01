"""The worker and every sampling field: exact at each verified row, whatever the drafts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.errors import GrammarFailed
from cluster.messages import Rule, SamplingSpec, SequenceRows, SequenceTokens, StepInput
from cluster.models.decoder import Decoder
from cluster.request import Grammar, GrammarKind
from cluster.sampling.runs import Run
from cluster.worker import Grammars, TargetWorker
from tests.test_worker import (
    BLOCK_SIZE,
    GREEDY,
    NUM_BLOCKS,
    NUM_NEW,
    PENALISED,
    VOCAB,
    Answer,
    Spy,
    guesses,
    load,
    plain,
    prompt_of,
    step,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 2
PROMPT = prompt_of(30)
FIELDS = {
    "frequency -2": SamplingSpec(
        seed=5, temperature=0.0, frequency_penalty=-2.0, num_prompt_tokens=30
    ),
    "frequency 2": SamplingSpec(
        seed=5, temperature=0.1, frequency_penalty=2.0, num_prompt_tokens=30
    ),
    "repetition": SamplingSpec(
        seed=5, temperature=0.0, repetition_penalty=1.3, num_prompt_tokens=30
    ),
    "presence": SamplingSpec(seed=5, temperature=0.1, presence_penalty=2.0, num_prompt_tokens=30),
    "min_tokens": SamplingSpec(
        seed=5,
        logit_bias=((EOS, 100.0),),
        suppressed_token_ids=(EOS,),
        suppressed_before=30 + 8,
    ),
    "allowed": SamplingSpec(seed=5, allowed_token_ids=tuple(range(100, 140))),
    "min_p": SamplingSpec(seed=5, min_p=0.1),
    "all": PENALISED,
}


@pytest.fixture
def decoder(checkpoints: dict[str, Path]) -> Decoder:
    return load(checkpoints["target"])


def make_worker(decoder: Decoder, grammars: Grammars | None = None) -> TargetWorker:
    return TargetWorker(decoder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, grammars=grammars)


def speculate(worker: TargetWorker, sampling: SamplingSpec, truth: Sequence[int], k: int) -> Answer:
    """The answer with drafts that are half true, k a step."""
    answer, rng = Answer(PROMPT, sampling), random.Random(k)
    while len(answer.token_ids) < NUM_NEW:
        drafts = guesses("partial", truth, len(answer.token_ids), k, rng)
        step(worker, [answer], [answer.rows(drafts=drafts)])
    return answer


@pytest.mark.parametrize("name", FIELDS)
def test_x40_x41_x42_every_field_is_exact_at_every_row(decoder: Decoder, name: str) -> None:
    """Tokens, logprobs and top logprobs to the last bit, with drafts true up to somewhere.

    And the field does something: without it the answer is another.
    """
    spec = FIELDS[name]
    expected = plain(decoder, PROMPT, spec)
    without = SamplingSpec(seed=spec.seed, temperature=spec.temperature)
    assert expected.token_ids != plain(decoder, PROMPT, without).token_ids
    for k in (1, 5):
        answer = speculate(make_worker(decoder), spec, expected.token_ids, k)
        assert answer.token_ids[:NUM_NEW] == expected.token_ids
        assert answer.logprobs[:NUM_NEW] == expected.logprobs
        assert answer.top[:NUM_NEW] == expected.top


def test_x40_penalties_that_miss_the_drafts_are_caught(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above fails when a row does not count the drafts before it as text."""
    spec = replace(FIELDS["frequency 2"], allowed_token_ids=tuple(range(100, 104)))
    expected = plain(decoder, PROMPT, spec)
    assert speculate(make_worker(decoder), spec, expected.token_ids, 5).token_ids[:NUM_NEW] == (
        expected.token_ids
    )
    histories = Run.histories
    monkeypatch.setattr(Run, "histories", lambda run: histories(run)[:1] * len(run.rows))
    answer = speculate(make_worker(decoder), spec, expected.token_ids, 5)
    assert answer.token_ids[:NUM_NEW] != expected.token_ids


def test_x40_held_back_ids_come_when_they_may(decoder: Decoder) -> None:
    """EOS biased up by 100 comes at the first position that min_tokens leaves it, not before."""
    token_ids = plain(decoder, PROMPT, FIELDS["min_tokens"]).token_ids
    assert token_ids.index(EOS) == 8


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("name", ["frequency -2", "repetition"])
def test_both_rules_are_greedy_at_temperature_0(decoder: Decoder, name: str, rule: Rule) -> None:
    """Under either rule a verified row is argmax of the same processed logits."""
    expected = plain(decoder, PROMPT, FIELDS[name])
    worker, answer, rng = make_worker(decoder), Answer(PROMPT, FIELDS[name]), random.Random(3)
    while len(answer.token_ids) < NUM_NEW:
        drafts = guesses("partial", expected.token_ids, len(answer.token_ids), 4, rng)
        rows = answer.rows(drafts=drafts)
        [tokens] = worker.step(StepInput(1, (rows,), rule=rule)).sequences
        answer.commit(rows, tokens)
    assert answer.token_ids[:NUM_NEW] == expected.token_ids
    assert answer.logprobs[:NUM_NEW] == expected.logprobs


# --- scores


def scored(
    worker: TargetWorker, chunks: Sequence[int], *, block_table: tuple[int, ...] = (0, 1, 2, 3, 4)
) -> list[float]:
    """The scores of the prompt's tokens, from these chunks of it."""
    scores: list[float] = []
    start = 0
    for size in chunks:
        token_ids = PROMPT[start : start + size]
        wanted = PROMPT[start + 1 : start + size + 1]
        last = start + size == len(PROMPT)
        rows = SequenceRows(
            seq_id=8,
            block_table=block_table,
            start=start,
            token_ids=token_ids,
            sampling=GREEDY if last else None,
            scored_token_ids=wanted,
        )
        [tokens] = worker.step(StepInput(1, (rows,))).sequences
        assert len(tokens.token_ids) == (1 if last else 0)
        assert tokens.logprobs == ()
        scores += tokens.scores
        start += size
    return scores


def test_scores_are_logprobs_of_the_text_whatever_the_chunks(decoder: Decoder) -> None:
    """Every prompt token but the first has the logprob, to the bit, it would be emitted with."""
    whole = scored(make_worker(decoder), [30])
    assert len(whole) == 29
    for chunks in ([1] * 30, [7, 1, 22], [29, 1], [1, 29]):
        assert scored(make_worker(decoder), chunks) == whole
    forced = SamplingSpec(seed=0, temperature=0.0, allowed_token_ids=(PROMPT[10],))
    answer = Answer(PROMPT[:10], forced)
    step(make_worker(decoder), [answer], [answer.rows()])
    assert answer.token_ids == [PROMPT[10]]
    assert answer.logprobs == [whole[9]]


def test_scores_of_a_long_chunk_go_through_the_head_in_parts(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more rows of logits at once than the bound, with the same bits; sampled rows apart."""
    spy = Spy(load(checkpoints["target"]))
    whole = scored(make_worker(spy), [30])  # type: ignore[arg-type]
    assert sorted(spy.head_rows) == [1, 29]
    spy.head_rows.clear()
    monkeypatch.setattr("cluster.worker.SCORED_AT_ONCE", 14)
    assert scored(make_worker(spy), [30]) == whole  # type: ignore[arg-type]
    assert sorted(spy.head_rows) == [1, 1, 14, 14]


def test_scores_without_rows_are_refused(decoder: Decoder) -> None:
    """Otherwise another sequence's rows would be scored."""
    rows = SequenceRows(
        seq_id=6, block_table=(0,), start=0, token_ids=(1, 2), scored_token_ids=(1, 2, 3)
    )
    with pytest.raises(ValueError, match="sequence 6: 3 scores of 2 rows"):
        make_worker(decoder).step(StepInput(1, (rows,)))


# --- sequences that cannot go on


def answered(worker: TargetWorker, *rows: SequenceRows) -> list[SequenceTokens]:
    return list(worker.step(StepInput(1, rows)).sequences)


def test_a_row_without_a_token_is_an_error_of_that_sequence_alone(decoder: Decoder) -> None:
    """The others get what they always get, and the error says where it happened."""
    empty = replace(GREEDY, allowed_token_ids=(3,), banned_token_ids=(3,))
    first, second = Answer(PROMPT, empty, (0, 1)), Answer(PROMPT, PENALISED, (2, 3))
    failed, fine = answered(make_worker(decoder), first.rows(), second.rows(seq_id=1))
    assert (failed.seq_id, failed.token_ids, failed.num_accepted) == (0, (), 0)
    assert failed.error == "no token is allowed at position 30"
    assert (failed.logprobs, failed.top_logprobs) == ((), ())
    assert fine.error is None
    assert list(fine.token_ids) == plain(decoder, PROMPT, PENALISED).token_ids[:1]


@pytest.mark.parametrize("rule", Rule)
def test_the_tokens_before_such_a_row_are_still_emitted(decoder: Decoder, rule: Rule) -> None:
    """With speculation a sequence fails after the same tokens as without, not a step earlier."""
    spec = replace(
        GREEDY,
        allowed_token_ids=(3, 4),
        logit_bias=((3, 50.0),),
        banned_sequences=((3, 3, 3), (3, 3, 4)),
    )
    worker, answer = make_worker(decoder), Answer(PROMPT, spec)
    step(worker, [answer], [answer.rows()])
    assert answer.token_ids == [3]
    rows = answer.rows(drafts=[3, 3, 3])
    [tokens] = worker.step(StepInput(1, (rows,), rule=rule)).sequences
    assert (tokens.token_ids, tokens.num_accepted, tokens.error) == ((3,), 0, None)
    answer.commit(rows, tokens)
    [tokens] = answered(worker, answer.rows(drafts=[4]))
    assert (tokens.token_ids, tokens.error) == ((), "no token is allowed at position 32")


class Counting:
    """A grammar of rising ids: every token is one to three more than the one before it."""

    def masks(self, sequence: SequenceRows) -> Tensor | None:
        """Fails for a source that says so."""
        assert sequence.grammar is not None
        if sequence.grammar.source == "broken":
            raise GrammarFailed("the grammar is broken")
        num_rows = sequence.num_drafts + 1
        last = torch.tensor(sequence.token_ids[-num_rows:]).unsqueeze(-1) % (VOCAB - 3)
        ahead = torch.arange(VOCAB) - last
        return (ahead >= 1) & (ahead <= 3)


COUNTING, BROKEN = (Grammar(GrammarKind.REGEX, source) for source in ("counting", "broken"))


@pytest.mark.parametrize("spec", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_x43_a_grammar_holds_at_every_row(decoder: Decoder, spec: SamplingSpec) -> None:
    """Drafts that break it, or keep to it, change nothing; each row follows the drafts before."""
    worker = make_worker(decoder, Counting())
    alone = Answer(PROMPT, spec, grammar=COUNTING)
    while len(alone.token_ids) < NUM_NEW:
        step(worker, [alone], [alone.rows()])
    text = [PROMPT[-1], *alone.token_ids]
    assert all(1 <= after - before % (VOCAB - 3) <= 3 for before, after in pairwise(text))
    rng, answer = random.Random(1), Answer(PROMPT, spec, grammar=COUNTING)
    num_steps = 0
    while len(answer.token_ids) < NUM_NEW:
        drafts = guesses("partial", alone.token_ids, len(answer.token_ids), 4, rng)
        step(worker, [answer], [answer.rows(drafts=drafts)])
        num_steps += 1
    assert num_steps < NUM_NEW
    assert answer.token_ids[:NUM_NEW] == alone.token_ids[:NUM_NEW]
    assert answer.logprobs[:NUM_NEW] == alone.logprobs[:NUM_NEW]


def test_x43_a_grammar_that_fails_is_an_error_of_that_request_alone(decoder: Decoder) -> None:
    """Its neighbours, with a grammar and without, get what they always get."""
    worker = make_worker(decoder, Counting())
    broken = Answer(PROMPT, GREEDY, (0, 1), grammar=BROKEN)
    counting = Answer(PROMPT, GREEDY, (2, 3), grammar=COUNTING)
    free = Answer(PROMPT, GREEDY, (4, 5))
    tokens = answered(worker, broken.rows(), counting.rows(seq_id=1), free.rows(seq_id=2))
    assert [each.seq_id for each in tokens] == [0, 1, 2]
    assert [each.error for each in tokens] == ["the grammar is broken", None, None]
    assert tokens[0].token_ids == ()
    assert list(tokens[2].token_ids) == plain(decoder, PROMPT, GREEDY).token_ids[:1]
    assert [tokens[1]] == answered(worker, counting.rows(seq_id=1))


def test_a_grammar_is_refused_where_there_are_none(decoder: Decoder) -> None:
    """It is never silently left out."""
    [tokens] = answered(make_worker(decoder), Answer(PROMPT, GREEDY, grammar=COUNTING).rows())
    assert tokens.error == "this target has no grammars"
