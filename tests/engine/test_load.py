"""What an engine tells of itself."""

import pytest

from cluster.engine.pace import FIRST_ROWS, MEMORY_STEPS, STRETCH, Pace
from cluster.errors import Overloaded
from cluster.prefixes import DIGEST_TOKENS, prefix_digests
from tests.fakes import FakeModel, SameDrafter
from tests.harness import (
    ask,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    running,
)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        """The time it is."""
        return self.now


def test_what_a_step_costs_is_learned_from_steps_of_several_sizes() -> None:
    """A line through rows and seconds; where all steps are alike all of it is the base."""
    pace = Pace(clock=Clock())
    assert (pace.base_seconds, pace.row_seconds) == (0.0, 0.0)
    for _ in range(10):
        pace.observe_step(num_rows=4, seconds=0.06)
    assert (pace.base_seconds, pace.row_seconds) == (pytest.approx(0.06), 0.0)
    for rows in (1, 8, 64, 2, 16):
        pace.observe_step(num_rows=rows, seconds=0.02 + 0.01 * rows)
    assert pace.row_seconds == pytest.approx(0.01)
    assert pace.base_seconds == pytest.approx(0.02)


def test_prompts_get_the_rows_that_make_a_step_so_many_times_as_long() -> None:
    """A few while it is not known what a row costs; then fewer the dearer one is; never none."""
    pace = Pace(clock=Clock())
    assert pace.more_rows(8) == FIRST_ROWS
    for _ in range(10):
        pace.observe_step(num_rows=8, seconds=0.1)
    assert pace.more_rows(8) == FIRST_ROWS
    for rows in (16, 8, 24):
        pace.observe_step(num_rows=rows, seconds=0.02 + 0.01 * rows)
    assert pace.more_rows(8) == pytest.approx((STRETCH - 1) * 0.1 / 0.01, abs=1)
    for _ in range(10 * MEMORY_STEPS):
        pace.observe_step(num_rows=8, seconds=0.001)
        pace.observe_step(num_rows=16, seconds=0.801)
    assert pace.more_rows(0) == 1


@pytest.mark.parametrize(
    ("free", "row_seconds"), [(0, 0.003), (0, 0.0001), (8, 0.003), (200, 0.0001)]
)
def test_rows_are_approached_and_the_bound_is_kept(free: int, row_seconds: float) -> None:
    """Twice as many as were seen at most, each time; where rows cost little until they do."""

    def seconds(num_rows: int) -> float:
        return 0.02 + row_seconds * max(num_rows - free, 0)

    pace = Pace(clock=Clock())
    most, stretches = 8, []
    for _ in range(MEMORY_STEPS):
        pace.observe_step(num_rows=8, seconds=seconds(8))
        rows = 8 + pace.more_rows(8)
        assert rows <= 8 + 2 * most
        most = max(most, rows)
        pace.observe_step(num_rows=rows, seconds=seconds(rows))
        stretches.append(seconds(rows) / seconds(8))
    assert max(stretches[20:]) < 1.2 * STRETCH
    assert min(stretches[20:]) > 0.75 * STRETCH


def test_steps_of_prompts_alone_say_nothing_of_rows_beside_streams() -> None:
    """Their rows are cheaper by far; what is told of steps in general has them, too."""
    pace = Pace(clock=Clock())
    for rows in (8, 16, 8, 12):
        pace.observe_step(num_rows=rows, seconds=0.02 + 0.01 * rows)
    before = pace.more_rows(8)
    for _ in range(20):
        pace.observe_step(num_rows=512, seconds=0.5, decodes=False)
    assert pace.more_rows(8) == before
    assert pace.row_seconds < 0.002


def test_what_steps_cost_is_forgotten() -> None:
    """After a machine has become slower its engines tell so."""
    pace = Pace(clock=Clock())
    for seconds in (0.01, 0.05):
        for step in range(10 * MEMORY_STEPS):
            pace.observe_step(num_rows=1 + step % 2, seconds=seconds)
    assert pace.base_seconds + pace.row_seconds == pytest.approx(0.05, rel=0.01)
    assert pace.step_seconds == pytest.approx(0.05, rel=0.01)


def test_rates_are_of_the_last_seconds() -> None:
    """As many as come, from the beginning, and none a while after the last."""
    clock = Clock()
    pace = Pace(clock=clock)
    for _ in range(200):
        clock.now += 0.1
        pace.observe_tokens(num_sequences=4, num_tokens=8, num_drafted=6, num_accepted=4)
        assert pace.tokens.per_second == pytest.approx(80, rel=0.2)
    assert pace.tokens_per_step == pytest.approx(2.0)
    assert pace.accepted.per_second < pace.drafted.per_second < pace.tokens.per_second
    clock.now += 30
    assert pace.tokens.per_second < 0.01


async def test_a_load_tells_what_is_held_and_how_it_went() -> None:
    """Places, prompts still to be computed, tokens a step, answers, and a full house's tokens."""
    limits = make_limits(max_num_seqs=2)
    engine = make_engine(make_fake_target(limits), SameDrafter(FakeModel()), limits=limits)
    for name in "abc":
        engine.submit(make_request([1, 2, 3], request_id=name), lambda _: None)
    before = engine.load()
    assert (before.waiting, before.prompt_tokens, before.capacity) == (3, 9, 0.0)
    assert (before.max_num_seqs, before.num_blocks, before.free_blocks) == (2, 2, 2)
    async with running(engine):
        await ask(engine, [make_request([5, 6], ignore_eos=True, max_tokens=40)])
    after = engine.load()
    assert (after.running, after.waiting, after.prompt_tokens) == (0, 0, 0)
    assert after.answer_tokens > 0
    assert 2 < after.tokens_per_step <= 5
    assert after.capacity > 0
    assert after.step_seconds > 0
    assert after.tokens_per_second > 0


@pytest.mark.parametrize("block_size", [8, 32, 256])
async def test_the_digests_are_those_of_what_need_not_be_computed(block_size: int) -> None:
    """Whatever the size of blocks: all whole prefixes of prompt and answer, and of nothing else."""
    limits = make_limits(block_size=block_size, num_blocks=4 * 256 // block_size)
    engine = make_engine(make_fake_target(limits), SameDrafter(FakeModel()), limits=limits)
    assert engine.prefixes() == frozenset()
    prompt = [token % 32 for token in range(2 * DIGEST_TOKENS + 5)]
    async with running(engine):
        [one] = await ask(engine, [make_request(prompt, ignore_eos=True, max_tokens=60)])
    tokens = [*prompt, *one.answer().token_ids]
    held = engine.prefixes()
    assert held == set(prefix_digests(tokens[:-1]))
    assert len(held) == (len(tokens) - 1) // DIGEST_TOKENS
    assert engine.prefixes() is held


async def test_no_digests_without_a_cache() -> None:
    """An engine that keeps nothing promises nothing."""
    limits = make_limits(prefix_cache=False)
    engine = make_engine(make_fake_target(limits), SameDrafter(FakeModel()), limits=limits)
    async with running(engine):
        await ask(engine, [make_request([1] * 100)])
    assert engine.prefixes() == frozenset()


async def test_x78_the_engines_own_bound_lets_in_who_had_begun_elsewhere() -> None:
    """A full queue refuses what is new, and no stream that came from a dead engine."""
    limits = make_limits(max_num_seqs=1, max_num_waiting=1)
    engine = make_engine(make_fake_target(limits), SameDrafter(FakeModel()), limits=limits)
    for name in "ab":
        engine.submit(make_request([1], request_id=name), lambda _: None)
    with pytest.raises(Overloaded) as refused:
        engine.submit(make_request([1], request_id="c"), lambda _: None)
    assert refused.value.retry_seconds > 0
    moved = make_request([1], request_id="d", output_token_ids=(4, 5))
    async with running(engine):
        [answer] = await ask(engine, [moved])
    assert answer.answer().token_ids
