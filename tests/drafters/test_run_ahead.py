"""Drafting while nobody asks: tails that are what a fresh model drafts, and are there in time."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.model import DraftModel
from cluster.drafters.survival import EDGES, Survival
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, Rule, SamplingSpec
from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder
from tests.checkpoints import make_checkpoint
from tests.drafters.test_model import (
    CONTEXT,
    GREEDY,
    PROMPT,
    WARM,
    CountingDecoder,
    continuation,
    draft_model,
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_checkpoint(tmp_path_factory.mktemp("draft"), vocab_size=300)
    return load_decoder(folder, dtype="float32")


class Engine:
    """The client's side: texts, each with its sampling, and one exchange at a time."""

    def __init__(self, model: DraftModel, *, rule: Rule = Rule.COUPLED) -> None:
        self.model = model
        self.client = ExchangeClient("e", rule=rule)
        self.texts: dict[int, tuple[list[int], SamplingSpec]] = {}

    def start(self, seq_id: int, prompt: Sequence[int], sampling: SamplingSpec = GREEDY) -> None:
        """A sequence."""
        self.texts[seq_id] = (list(prompt), sampling)

    def ask(
        self, num_wanted: int, *, price: float = 0.0, budget_seconds: float = inf
    ) -> dict[int, Draft]:
        """The drafts of all."""
        queries = [
            DraftQuery(
                seq_id=seq_id,
                token_ids=token_ids,
                num_wanted=num_wanted,
                sampling=sampling,
                price=price,
            )
            for seq_id, (token_ids, sampling) in self.texts.items()
        ]
        message = self.client.message(queries, budget_seconds=budget_seconds)
        return self.client.digest(self.model.exchange(message))

    def commit(self, decoder: Decoder, num_tokens: int) -> None:
        """The target, of the same weights, says so many tokens of each."""
        for token_ids, sampling in self.texts.values():
            token_ids.extend(continuation(decoder, token_ids, sampling, num_tokens))


def advance_to_the_end(model: DraftModel) -> int:
    """Run ahead until nothing is left; how many passes that took."""
    num_passes = 0
    while model.advance():
        num_passes += 1
    return num_passes


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_what_was_drafted_ahead_needs_no_pass_when_it_is_asked_for(
    decoder: Decoder, sampling: SamplingSpec
) -> None:
    """With the target's weights all is right, so after the first exchange all is there in time."""
    counting = CountingDecoder(decoder)
    engine = Engine(draft_model(counting))  # type: ignore[arg-type]
    for seq_id in range(3):
        engine.start(seq_id, PROMPT[seq_id:], sampling)
    engine.ask(4)
    for _ in range(3):
        advance_to_the_end(engine.model)
        engine.commit(decoder, 5)  # the whole draft and the bonus token
        counting.rows.clear()
        drafts = engine.ask(4)
        assert counting.rows == []
        for seq_id, (token_ids, _) in engine.texts.items():
            assert drafts[seq_id].token_ids == continuation(decoder, token_ids, sampling, 4)


def test_running_ahead_takes_all_sequences_in_one_pass(decoder: Decoder) -> None:
    """One row a sequence and pass, to twice the draft and one token, and then there is an end."""
    counting = CountingDecoder(decoder)
    engine = Engine(draft_model(counting))  # type: ignore[arg-type]
    for seq_id in range(3):
        engine.start(seq_id, PROMPT[seq_id:])
    engine.ask(4)
    counting.rows.clear()
    assert advance_to_the_end(engine.model) == 5
    assert counting.rows == [3] * 5
    assert not engine.model.advance()
    assert counting.rows == [3] * 5


def test_tails_end_at_their_longest_and_at_the_context_limit(decoder: Decoder) -> None:
    """Neither memory nor positions are overrun by what nobody has asked for."""
    engine = Engine(draft_model(decoder, max_tail=6))
    engine.start(1, PROMPT)
    engine.start(2, list(range(20, 20 + CONTEXT - 3)))
    engine.ask(4)
    advance_to_the_end(engine.model)
    assert [len(context.tail) for context in engine.model._contexts] == [6, 3]


@settings(max_examples=12, deadline=None)
@given(
    schedule=st.lists(
        st.tuples(
            st.integers(1, 5),  # wanted
            st.integers(0, 7),  # passes ahead
            st.integers(0, 6),  # tokens the target says that the draft would
            st.lists(st.integers(0, 299), max_size=2),  # and others
        ),
        min_size=3,
        max_size=8,
    ),
    temperature=st.sampled_from([0.0, 0.9]),
    rule=st.sampled_from(Rule),
)
def test_any_schedule_drafts_what_a_fresh_model_does(
    decoder: Decoder,
    schedule: list[tuple[int, int, int, list[int]]],
    temperature: float,
    rule: Rule,
) -> None:
    """Tokens, margins and distributions alike, however much was drafted ahead and thrown away."""
    engine = Engine(draft_model(decoder, max_rows=8), rule=rule)
    for seq_id in range(3):
        engine.start(
            seq_id, PROMPT * (seq_id + 1), SamplingSpec(seed=seq_id, temperature=temperature)
        )
    for num_wanted, num_passes, num_right, others in schedule:
        drafts = engine.ask(num_wanted)
        fresh = Engine(draft_model(decoder), rule=rule)
        fresh.texts = engine.texts
        for seq_id, expected in fresh.ask(num_wanted).items():
            draft = drafts[seq_id]
            assert draft == expected or draft == Draft()  # a prompt still being taken in
        for _ in range(num_passes):
            engine.model.advance()
        for seq_id, (token_ids, _) in engine.texts.items():
            token_ids += [*drafts[seq_id].token_ids[:num_right], *others]
    engine.client.release(list(engine.texts))
    engine.texts.clear()
    engine.ask(1)
    assert engine.model.num_sequences == 0
    assert engine.model._contexts.num_free_slots == 8


def test_a_long_prompt_waits_for_idle_moments(decoder: Decoder) -> None:
    """Where there is time between exchanges none of them computes another sequence's prompt."""
    counting = CountingDecoder(decoder)
    engine = Engine(draft_model(counting, max_rows=32))  # type: ignore[arg-type]
    engine.start(1, PROMPT)
    engine.ask(3)
    engine.model.advance()
    engine.start(2, [token % 300 for token in range(7, 107)])
    lengths = []
    for _ in range(30):
        counting.rows.clear()
        drafts = engine.ask(3)
        assert len(drafts[1].token_ids) == 3
        assert max(counting.rows, default=0) <= 2 + 8  # the others' rows, and the last few of it
        lengths.append(len(drafts[2].token_ids))
        counting.rows.clear()
        engine.model.advance()
        assert max(counting.rows, default=0) <= 8  # what an exchange may have to wait for
        engine.texts[1][0].append(9)
    assert lengths[0] == 0
    assert lengths[-1] == 3
    assert drafts[2].token_ids == continuation(decoder, engine.texts[2][0], GREEDY, 3)


def test_without_idle_moments_a_prompt_is_taken_in_all_the_same(decoder: Decoder) -> None:
    """A worker that is asked without a pause starves nobody."""
    engine = Engine(draft_model(decoder, max_rows=32))
    engine.start(1, PROMPT)
    engine.ask(3)
    engine.model.advance()
    engine.start(2, [token % 300 for token in range(7, 107)])
    lengths = [len(engine.ask(3)[2].token_ids) for _ in range(8)]
    assert lengths[-1] == 3


def test_a_budget_ends_the_draft_not_the_exchange(decoder: Decoder) -> None:
    """Out of time there is what was drafted ahead; without running ahead at least one token."""
    engine = Engine(draft_model(decoder))
    engine.start(1, PROMPT)
    engine.ask(1)
    engine.model.advance()
    assert len(engine.ask(4, budget_seconds=0.0)[1].token_ids) == 2
    alone = Engine(draft_model(decoder))
    alone.start(1, PROMPT)
    assert 1 <= len(alone.ask(4, budget_seconds=0.0)[1].token_ids) <= 4


def test_what_does_not_pay_is_neither_drafted_nor_sent(decoder: Decoder) -> None:
    """A tail ends where it survives with less than the price, but for its first token."""
    counting = CountingDecoder(decoder)
    engine = Engine(draft_model(counting))  # type: ignore[arg-type]
    engine.start(1, PROMPT, WARM)
    for _ in range(30):  # the target never says what is drafted
        draft = engine.ask(4)[1]
        engine.texts[1][0].append((draft.token_ids[0] + 1) % 300)
    draft = engine.ask(8, price=0.5)[1]
    assert len(draft.token_ids) == 1
    counting.rows.clear()
    assert not engine.model.advance()
    assert counting.rows == []
    assert len(engine.ask(8)[1].token_ids) == 8  # free of charge again
    assert len(engine.ask(8, price=0.5)[1].token_ids) == 1


def test_every_token_has_its_margin_and_its_drafter(decoder: Decoder) -> None:
    """The lead of the best logit is known before the draw, and so the same at any temperature."""
    model = draft_model(decoder)
    model._name = "small"
    engine = Engine(model)
    engine.start(1, PROMPT, GREEDY)
    engine.start(2, PROMPT, replace(GREEDY, temperature=2.0, seed=4))
    engine.start(3, PROMPT, replace(GREEDY, allowed_token_ids=(7,)))
    drafts = engine.ask(3)
    assert {draft.drafter for draft in drafts.values()} == {"small"}
    assert all(len(draft.margins) == 3 for draft in drafts.values())
    assert drafts[1].margins[0] == drafts[2].margins[0] > 0
    assert drafts[3].margins == (64.0, 64.0, 64.0)  # finite, though there was no other token


class TestSurvival:
    """What is learned from graded tails."""

    def test_rises_with_the_margin_when_it_does(self) -> None:
        """A token that leads by far is kept more often, if that is what was seen."""
        survival = Survival()
        for _ in range(200):
            survival.observe([5.0], num_right=1, num_known=1)
            survival.observe([0.1], num_right=0, num_known=1)
        low, high = (next(survival.cumulative([margin])) for margin in (0.1, 5.0))
        assert low < 0.1
        assert high > 0.9

    def test_what_is_unknown_teaches_nothing(self) -> None:
        """After the first wrong token, and beyond what is committed, there is nothing to learn."""
        one, other = Survival(), Survival()
        one.observe([1.0, 5.0, 5.0], num_right=0, num_known=3)
        other.observe([1.0], num_right=0, num_known=1)
        assert list(one.cumulative(EDGES)) == list(other.cumulative(EDGES))
        before = list(one.cumulative(EDGES))
        one.observe([1.0, 5.0], num_right=0, num_known=0)
        assert list(one.cumulative(EDGES)) == before

    def test_a_price_cuts_at_the_first_token_under_it(self) -> None:
        """And never before the first one: who asks wants to know."""
        survival = Survival()
        chances = list(survival.cumulative([1.0] * 8))
        assert chances == sorted(chances, reverse=True)
        for price in (0.0, 0.2, 0.5, 0.81, 1.0):
            expected = sum(chance >= price for chance in chances)
            assert survival.num_worth([1.0] * 8, price) == max(expected, 1)
