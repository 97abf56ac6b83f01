"""Timed parts: what they say is one function of the prefix, and drafts are right as often as told.

No test looks at a clock.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.control.policy import FixedPolicy
from cluster.drafters.model import ModelDrafter
from cluster.drafters.silent import NoDrafter
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.tools.bench.ideal import Roofline, Setting
from cluster.tools.bench.open_load import LOADS, arrivals, capacity
from cluster.tools.bench.orchestration import WAYS, Way, settings, timed_draft_model
from cluster.tools.bench.steady import is_true, steady_rate, timed_engine, timed_request
from cluster.tools.bench.timed import (
    Acceptance,
    Constant,
    Regimes,
    TimedDrafter,
    TimedWorker,
    drafted_token,
    true_token,
)

NOTHING = Roofline(0.0)


def share_right(acceptance: Acceptance, positions: range) -> float:
    """How many drafted tokens of a chain are the true ones."""
    token_id, right = 5, 0
    for position in positions:
        truth = true_token(token_id, position)
        right += drafted_token(token_id, position, acceptance) == truth
        token_id = truth
    return right / len(positions)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_drafts_are_right_as_often_as_told(rate: float) -> None:
    """Over many positions the share of right drafts is the acceptance."""
    assert share_right(Constant(rate), range(1, 5000)) == pytest.approx(rate, abs=0.03)


def test_stretches_are_easy_or_hard() -> None:
    """Regimes come in stretches, and both kinds are there."""
    regimes = Regimes(1.0, 0.0, length=50)
    shares = {share_right(regimes, range(start, start + 50)) for start in range(0, 2000, 50)}
    assert shares == {0.0, 1.0}


def test_the_worker_keeps_what_is_true() -> None:
    """Drafts are accepted up to the first that is wrong; the next token is the target's."""
    first = true_token(7, 3)
    second = true_token(first, 4)
    rows = SequenceRows(
        seq_id=1,
        block_table=(0,),
        start=2,
        token_ids=(7, first, second, 1),
        num_drafts=3,
        sampling=SamplingSpec(seed=0, temperature=0.0),
    )
    worker = TimedWorker(NOTHING)
    [answer] = worker.step(StepInput(1, (rows,))).sequences
    third = true_token(second, 5)
    assert third != 1
    assert answer.token_ids == (first, second, third)
    assert answer.num_accepted == 2
    assert (worker.num_steps, worker.num_rows) == (1, 4)


async def test_the_drafter_drafts_what_it_is_asked() -> None:
    """As many tokens as wanted, with a margin each, by the chain the worker knows."""
    drafter = TimedDrafter(NOTHING, Constant(1.0))
    query = DraftQuery(
        seq_id=3,
        token_ids=[4, 9],
        num_wanted=3,
        sampling=SamplingSpec(seed=0, temperature=0.0),
    )
    try:
        drafts = await drafter.propose([query])
    finally:
        drafter.close()
    first = true_token(9, 2)
    second = true_token(first, 3)
    assert drafts[3].token_ids == (first, second, true_token(second, 4))
    assert len(drafts[3].margins) == 3


@asynccontextmanager
async def ahead(case: Setting) -> AsyncIterator[Drafter]:
    """The real draft model's bookkeeping on a decoder that sleeps, running ahead."""
    drafter = ModelDrafter(timed_draft_model(case), name="timed", run_ahead=True)
    try:
        yield drafter
    finally:
        drafter.close()


@pytest.mark.parametrize("way", [Way.OFF, Way.WAITING, Way.AHEAD])
@pytest.mark.parametrize("acceptance", [0.6, 1.0])
async def test_every_way_brings_the_same_tokens(way: Way, acceptance: float) -> None:
    """Whatever drafts, an answer is the timed target's own, and complete."""
    case = Setting(
        num_sequences=3,
        num_speculative_tokens=4,
        acceptance=acceptance,
        target=Roofline(0.001),
        draft=Roofline(0.0001),
    )
    requests = [timed_request(number, max_tokens=40) for number in range(3)]
    async with (
        WAYS[way](case) as drafting,
        timed_engine(case.target, drafting.drafter, FixedPolicy(4), max_num_seqs=3) as engine,
    ):

        async def answer(number: int) -> list[int]:
            return [
                token_id
                async for delta in engine.generate(requests[number])
                for token_id in delta.token_ids
            ]

        answers = await asyncio.gather(*map(answer, range(3)))
    assert [len(each) for each in answers] == [40] * 3
    assert all(map(is_true, requests, answers))
    assert len({tuple(each) for each in answers}) == 3


def test_a_wrong_token_is_seen() -> None:
    """The check of answers fails for one that is not the target's."""
    request = timed_request(0, max_tokens=3)
    first = true_token(request.prompt_token_ids[-1], len(request.prompt_token_ids))
    assert is_true(request, [first])
    assert is_true(request, [])
    assert not is_true(request, [first, first + 1])


async def test_the_steady_rate_counts_whole_steps() -> None:
    """Without drafts every step brings one token of each sequence, so both counts agree."""
    async with timed_engine(Roofline(0.002), NoDrafter(), FixedPolicy(0), max_num_seqs=4) as engine:
        steady = await steady_rate(engine, num_sequences=4, warm_up=0.05, seconds=0.5)
    assert steady.num_tokens == 4 * steady.num_steps > 0
    assert steady.rate == pytest.approx(4 / steady.step_seconds)


def test_the_settings_leave_room_to_hide_in() -> None:
    """One of them could bring 1.8 times as much by drafting ahead, as the target asks for."""
    for step_seconds in (0.02, 0.08):
        mixed, whole = settings(step_seconds)
        assert whole.overlapped_rate / whole.synchronous_rate == pytest.approx(1.8)
        assert 1 <= mixed.overlapped_rate / mixed.synchronous_rate < 1.2


def test_arrivals_are_as_many_as_the_load_says() -> None:
    """Requests come in order and within the time, in proportion to the load."""
    for load in LOADS:
        planned = arrivals(load, 200.0)
        moments = [each.arrives for each in planned]
        assert moments == sorted(moments)
        assert moments[-1] < 200.0
        assert len(planned) == pytest.approx(load * capacity() * 200.0, rel=0.25)
    assert arrivals(1.0, 5.0) == arrivals(1.0, 5.0)
