"""Advice on prepared situations, and laws that hold in all of them. Pure: no cluster, no model."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tools.choosing.advice import Advice, Answer, advise
from cluster.tools.choosing.facts import DrafterFacts, Facts, Place, StepCosts
from cluster.tools.choosing.findings import Topic
from cluster.tools.choosing.gains import best_gain
from cluster.tools.choosing.obstacles import WORTH, Cause

FLAT = StepCosts.of([(1, 0.020), (128, 0.0205), (256, 0.041)])  # free rows, like a large device
STEEP = StepCosts.of([(1, 0.020), (2, 0.025), (64, 0.320)])  # every row is paid for
GOOD = tuple(0.85**place for place in range(1, 9))
POOR = tuple(0.08**place for place in range(1, 9))
MODEL = DrafterFacts(
    name="small", survival=GOOD, token_seconds=0.001, place=Place.IN_PROCESS, memory_bytes=2**28
)
REMOTE = replace(
    MODEL, place=Place.WORKERS, wait_seconds=0.004, token_seconds=0.0, exchange_seconds=0.003
)
NGRAM = DrafterFacts(name="ngram", survival=tuple(0.6**place for place in range(1, 9)))
IDLE = Facts(
    model="m",
    num_engines=2,
    max_num_seqs=32,
    running=1.5,
    waiting=0.0,
    queue_seconds=0.0,
    utilisation=0.3,
    costs=FLAT,
    prompt_tokens=200.0,
    answer_tokens=300.0,
    kv_usage=0.1,
    preemptions_per_request=0.0,
    drafters=(MODEL,),
)


def finding(advice: Advice, topic: Topic) -> str:
    """All that is said on a topic."""
    return " ".join(
        f"{each.says} {each.because}" for each in advice.findings if each.topic is topic
    )


def test_an_idle_flat_target_guesses_deep() -> None:
    """Rows are free and nobody waits: yes, as deep as drafts last."""
    advice = advise(IDLE)
    assert advice.answer is Answer.YES
    assert advice.depth >= 6
    assert advice.speedup > 2
    assert "Nobody waits" in finding(advice, Topic.LOAD)


def test_a_saturated_target_does_not_guess() -> None:
    """Every row is paid for and all places are taken: no, and from which load on yes."""
    advice = advise(replace(IDLE, costs=STEEP, running=32.0, waiting=12.0, utilisation=1.0))
    assert (advice.answer, advice.cause) == (Answer.NO, Cause.LOAD)
    assert advice.depth == 0
    [said] = [each for each in advice.findings if each.topic is Topic.SPECULATE]
    assert 1 <= said.figures["pays_up_to"] < 32
    assert "more targets" in finding(advice, Topic.LOAD)


def test_short_answers_leave_nothing_to_guess() -> None:
    """A long prompt and two tokens: no, and from which length on yes."""
    advice = advise(replace(IDLE, prompt_tokens=2000.0, answer_tokens=2.0))
    assert (advice.answer, advice.cause) == (Answer.NO, Cause.SHORT_ANSWERS)
    [said] = [each for each in advice.findings if each.topic is Topic.SPECULATE]
    assert 2 < said.figures["needed_answer_tokens"] < 2000


def test_tight_memory_takes_drafts_elsewhere() -> None:
    """Sequences are put back for want of blocks: drafts that need none, or a pool of workers."""
    tight = replace(IDLE, kv_usage=0.97, preemptions_per_request=0.4)
    both = advise(replace(tight, drafters=(MODEL, NGRAM)))
    assert (both.answer, both.drafter, both.place) == (Answer.YES, "ngram", Place.IN_PROCESS)
    alone = advise(tight)
    assert (alone.answer, alone.place) == (Answer.YES, Place.WORKERS)
    assert "Memory is tight" in finding(alone, Topic.MEMORY)
    assert advise(replace(IDLE, drafters=(MODEL, NGRAM))).drafter == "small"


def test_a_poor_draft_is_named_as_such() -> None:
    """Neither load, nor time, nor length: too little is kept, and how much it would take."""
    advice = advise(replace(IDLE, drafters=(replace(MODEL, survival=POOR),)))
    assert (advice.answer, advice.cause) == (Answer.NO, Cause.ACCEPTANCE)
    [said] = [each for each in advice.findings if each.topic is Topic.SPECULATE]
    assert said.figures["acceptance"] == pytest.approx(0.08)
    assert 0.08 < said.figures["needed_acceptance"] < 0.5


def test_a_remote_draft_that_is_too_slow_moves_nearer() -> None:
    """Good drafts, computed in time, that are long under way: not from there, but colocated."""
    slow = replace(REMOTE, wait_seconds=0.2)
    advice = advise(replace(IDLE, drafters=(slow,)))
    assert (advice.answer, advice.cause) == (Answer.NO, Cause.DRAFT_TIME)
    assert advice.place is Place.COLOCATED
    assert "the rest is the way" in finding(advice, Topic.PLACEMENT)
    assert advise(replace(IDLE, drafters=(REMOTE,))).answer is Answer.YES


def test_workers_follow_what_exchanges_take() -> None:
    """As many as are busy for seventy percent of their time, over all engines."""
    busy = replace(REMOTE, exchange_seconds=0.012, wait_seconds=0.004)
    few = advise(replace(IDLE, drafters=(busy,)))
    many = advise(replace(IDLE, num_engines=16, drafters=(busy,)))
    assert few.num_workers == 2  # 2 * 12 ms in every 24 ms are 1.0, over 0.7
    assert many.num_workers == 12
    assert advise(replace(IDLE, drafters=(NGRAM,))).num_workers == 0


def test_what_nobody_has_tried_is_to_be_tried() -> None:
    """Without any verified draft the acceptance that would pay is said, higher under load."""
    advice = advise(replace(IDLE, costs=STEEP, running=None, drafters=()))
    assert (advice.answer, advice.drafter) == (Answer.TRY, "ngram")
    figures = advice.findings[0].figures
    assert 0 < figures["needed_acceptance"] < figures["needed_acceptance_when_full"] <= 1


def test_without_a_timed_step_nothing_is_claimed() -> None:
    """No guess at what steps cost."""
    advice = advise(Facts(model="m"))
    assert advice.answer is Answer.UNKNOWN
    assert advice.depth == 0


chances = st.lists(st.floats(0, 1), min_size=1, max_size=8)
survivals = chances.map(lambda rates: tuple(accumulate(rates, lambda one, two: one * two)))
costs = st.tuples(st.floats(1e-4, 1.0), st.floats(0, 10), st.floats(0, 10), st.integers(2, 64)).map(
    lambda made: StepCosts.of(
        [
            (1, made[0]),
            (made[3], made[0] * (1 + made[1])),
            (4 * made[3], made[0] * (1 + made[1] + made[2])),
        ]
    )
)
drafters = st.builds(
    DrafterFacts,
    name=st.just("d"),
    survival=survivals,
    coverage=st.floats(0, 1),
    wait_seconds=st.floats(0, 0.5),
    token_seconds=st.floats(0, 0.1),
    place=st.sampled_from(Place),
    exchange_seconds=st.floats(0, 0.1),
    memory_bytes=st.sampled_from([0, 2**30]),
)
situations = st.builds(
    Facts,
    model=st.just("m"),
    num_engines=st.integers(1, 8),
    max_num_seqs=st.integers(1, 16),
    running=st.floats(0, 16),
    waiting=st.floats(0, 100),
    costs=costs,
    prompt_tokens=st.floats(0, 4000),
    answer_tokens=st.floats(1, 2000),
    kv_usage=st.floats(0, 1),
    drafters=drafters.map(lambda drafter: (drafter,)),
)


@given(facts=situations, more=st.floats(0, 1))
def test_more_acceptance_never_turns_yes_into_no(facts: Facts, more: float) -> None:
    """All else being equal, drafts that are kept more often bring no less."""
    [drafter] = facts.drafters
    kept = tuple(chance + more * (1 - chance) for chance in drafter.survival)
    better = replace(facts, drafters=(replace(drafter, survival=kept),))
    before, after = advise(facts), advise(better)
    assert after.speedup >= before.speedup * (1 - 1e-12)
    assert not (before.answer is Answer.YES and after.answer is Answer.NO)


@given(facts=situations, part=st.floats(0, 1))
def test_sooner_drafts_never_turn_yes_into_no(facts: Facts, part: float) -> None:
    """All else being equal, a shorter wait brings no less."""
    [drafter] = facts.drafters
    sooner = replace(
        drafter,
        wait_seconds=part * drafter.wait_seconds,
        token_seconds=part * drafter.token_seconds,
    )
    before, after = advise(facts), advise(replace(facts, drafters=(sooner,)))
    assert after.speedup >= before.speedup * (1 - 1e-12)
    assert not (before.answer is Answer.YES and after.answer is Answer.NO)


@given(facts=situations, longer=st.floats(1, 10))
def test_longer_answers_never_bring_less(facts: Facts, longer: float) -> None:
    """All else being equal, there is more to guess."""
    [drafter] = facts.drafters
    assert facts.costs is not None
    more = replace(facts, answer_tokens=(facts.answer_tokens or 1) * longer)
    number = max(facts.running or 1.0, 1.0)
    before, after = (
        best_gain(each, facts.costs, drafter, num_sequences=number) for each in (facts, more)
    )
    assert after.speedup >= before.speedup * (1 - 1e-9)


@given(facts=situations)
def test_advice_is_consistent(facts: Facts) -> None:
    """Yes has a depth, a drafter and a gain that is worth it; no has a cause and no depth."""
    advice = advise(facts)
    if advice.answer is Answer.YES:
        assert 1 <= advice.depth <= facts.most_depth
        assert advice.speedup >= WORTH
        assert advice.cause is None
    else:
        assert advice.answer is Answer.NO
        assert (advice.depth, advice.cause is None) == (0, False)
    assert (advice.num_workers > 0) == (
        advice.answer is Answer.YES and advice.place is not Place.IN_PROCESS
    )
    assert all(each.says and each.because for each in advice.findings)


@given(facts=situations)
def test_another_drafter_never_makes_it_worse(facts: Facts) -> None:
    """With memory to spare, of several the one that brings most is taken."""
    roomy = replace(facts, kv_usage=0.0)
    second = replace(NGRAM, survival=GOOD)
    both = advise(replace(roomy, drafters=(*facts.drafters, second)))
    for one in (facts.drafters, (second,)):
        assert both.speedup >= advise(replace(roomy, drafters=one)).speedup
