"""Who runs in a step: the budget, the places, the blocks and the drafts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.policy import FixedPolicy
from cluster.engine.limits import USUAL_PROMPT_ROWS, EngineLimits
from cluster.engine.plan import Plan
from cluster.engine.queue import AGING_STEPS
from cluster.engine.scheduler import DraftSize, Scheduler, size_draft
from cluster.engine.sequence import Sequence
from cluster.errors import ConfigurationError
from cluster.metrics import DRAFT_LIMITS
from cluster.request import Request, SpeculationParams
from tests.harness import make_limits, make_request


def plain_limits(**changes: float) -> EngineLimits:
    """Without the cache: these prompts are all alike."""
    return make_limits(**({"prefix_cache": False} | changes))


class Schedule:
    """A scheduler that is played without a target: every sampled sequence gets token 1."""

    def __init__(self, limits: EngineLimits, k: int = 0, draft_context: int | None = None) -> None:
        self.scheduler = Scheduler(limits, draft_context_limit=draft_context)
        self.limits = limits
        self.prompt_rows = limits.max_prompt_rows_beside_decodes or USUAL_PROMPT_ROWS
        self.policy = FixedPolicy(k)
        self.sequences: list[Sequence] = []

    def add(self, request: Request) -> Sequence:
        """Queue a request."""
        sequence = Sequence(
            request,
            seq_id=len(self.sequences) + 1,
            emit=lambda _: None,
            eos_token_ids=frozenset(),
            max_model_len=self.limits.max_model_len,
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[int, tuple[int, int]]:
        """Rows and drafts of this step by sequence id, after committing it."""
        plan = self.scheduler.schedule(self.policy, prompt_rows=lambda _: self.prompt_rows)
        self.commit(plan)
        return {turn.sequence.seq_id: (turn.num_rows, turn.num_drafts) for turn in plan.turns}

    def commit(self, plan: Plan) -> None:
        """Every row was computed, every draft rejected."""
        total = sum(turn.num_rows + turn.num_drafts for turn in plan.turns)
        assert 0 < total <= self.limits.max_num_batched_tokens
        for turn in plan.turns:
            samples = turn.samples
            turn.sequence.num_computed_tokens += turn.num_rows
            self.scheduler.settle(turn.sequence)
            if samples:
                turn.sequence.extend((1,))
                if turn.sequence.finish_reason() is not None:
                    self.scheduler.remove(turn.sequence)


def test_prompts_fill_what_decodes_leave_of_the_budget() -> None:
    """A decode has its row, a prompt of 20 takes the other 7, and goes on where it stopped."""
    play = Schedule(plain_limits(max_num_batched_tokens=8))
    play.add(make_request([1, 2, 3]))
    assert play.step() == {1: (3, 0)}
    play.add(make_request(range(20)))
    assert play.step() == {1: (1, 0), 2: (7, 0)}
    assert play.step() == {1: (1, 0), 2: (7, 0)}
    assert play.step() == {1: (1, 0), 2: (6, 0)}
    assert play.step() == {1: (1, 0), 2: (1, 0)}


def test_drafts_are_for_sequences_with_one_uncomputed_token() -> None:
    """x09: a prompt in three chunks brings drafts only after the last."""
    play = Schedule(plain_limits(max_num_batched_tokens=8), k=3)
    play.add(make_request(range(20)))
    assert [play.step()[1] for _ in range(4)] == [(8, 0), (8, 0), (4, 0), (1, 3)]


def test_drafts_and_prompts_share_what_the_first_rows_leave() -> None:
    """Neither starves: with both pressing, each gets about half."""
    play = Schedule(plain_limits(max_num_batched_tokens=9, max_num_seqs=2), k=16)
    play.add(make_request([1]))
    play.step()
    play.add(make_request(range(31)))
    assert play.step() == {1: (1, 4), 2: (4, 0)}
    play.sequences[1].num_computed_tokens = 30
    assert play.step() == {1: (1, 7), 2: (1, 0)}


def test_a_running_sequence_never_skips_a_step() -> None:
    """x08: six sequences and prompts press on three rows; whoever runs has a row in each step."""
    play = Schedule(plain_limits(max_num_batched_tokens=3, max_num_seqs=6), k=4)
    for length in (1, 9, 1, 4, 1, 2):
        play.add(make_request(range(length), max_tokens=7))
    while play.scheduler.has_work:
        running = {sequence.seq_id for sequence in play.scheduler.running}
        assert running <= set(play.step())
    assert all(len(s.token_ids) == len(s.request.prompt_token_ids) + 7 for s in play.sequences)


def test_the_oldest_prompt_is_finished_first() -> None:
    """Of several prompts the older takes what there is; the younger has what is left of it."""
    play = Schedule(plain_limits(max_num_batched_tokens=8, max_num_seqs=2))
    for _ in range(2):
        play.add(make_request(range(12)))
    assert [play.step() for _ in range(3)] == [
        {1: (8, 0)},
        {1: (4, 0), 2: (4, 0)},
        {1: (1, 0), 2: (7, 0)},
    ]


def test_places_are_given_in_the_order_of_arrival() -> None:
    """With two places the third waits until one has ended."""
    play = Schedule(plain_limits(max_num_seqs=2))
    for _ in range(3):
        play.add(make_request([1, 2], max_tokens=2))
    assert set(play.step()) == {1, 2}
    assert play.scheduler.num_queued == 1
    assert set(play.step()) == {1, 2}
    assert set(play.step()) == {3}


def test_a_sequence_is_admitted_only_when_its_whole_prompt_has_blocks() -> None:
    """The head of the queue waits for its blocks, and nobody overtakes it."""
    play = Schedule(plain_limits(max_model_len=16, block_size=4, num_blocks=4))
    play.add(make_request(range(9), max_tokens=1))
    play.add(make_request(range(6)))
    play.add(make_request([1]))
    assert set(play.step()) == {1}
    assert set(play.step()) == {2, 3}


@pytest.mark.parametrize("k", [0, 3])
def test_x55_a_long_prompt_makes_the_steps_of_streams_longer_by_a_bound(k: int) -> None:
    """Eight decode when 4,000 tokens arrive: beside them the prompt has what 24 first rows cost.

    It goes on in every step, the streams skip none, and it takes as many steps as that makes.
    """
    limits = plain_limits(max_model_len=4200, max_num_seqs=10, max_num_batched_tokens=512)
    play = Schedule(limits, k=k)
    for index in range(8):
        play.add(make_request([index], max_tokens=None))
    play.step()
    play.step()
    most = limits.prompt_cost(USUAL_PROMPT_ROWS, 0)
    long = play.add(make_request([i % 32 for i in range(4000)]))
    num_steps = 0
    while len(long.token_ids) == 4000:
        before = long.num_computed_tokens
        turns = play.step()
        num_steps += 1
        assert all(turns[seq_id] == (1, k) for seq_id in range(1, 9))
        num_rows, _ = turns[long.seq_id]
        assert num_rows >= 1
        assert limits.prompt_cost(num_rows, before) <= most
    assert num_steps < 1.15 * limits.prompt_cost(4000, 0) / most


@given(
    keys_per_row=st.integers(1, 10_000),
    position=st.integers(0, 100_000),
    cost=st.floats(1, 1000),
)
def test_prompt_rows_are_the_most_that_their_cost_allows(
    keys_per_row: int, position: int, cost: float
) -> None:
    """One more would cost more."""
    limits = plain_limits(keys_per_row=keys_per_row)
    num_rows = limits.prompt_rows(cost, position)
    assert limits.prompt_cost(num_rows, position) <= cost + 0.001
    assert limits.prompt_cost(num_rows + 1, position) > cost - 0.001


def test_prompts_share_what_they_have_beside_decodes_oldest_first() -> None:
    """Two prompts have 32 rows together, not each; with nothing decoding they have them all.

    The last 8 of the first see more keys than the first 8 of 32 would: the second has one fewer.
    """
    limits = plain_limits(max_num_batched_tokens=64, max_prompt_rows_beside_decodes=32)
    play = Schedule(limits)
    play.add(make_request([1], max_tokens=3))
    play.step()
    for _ in range(2):
        play.add(make_request(range(40), max_tokens=1))
    assert play.step() == {1: (1, 0), 2: (32, 0)}
    assert play.step() == {1: (1, 0), 2: (8, 0), 3: (23, 0)}
    assert play.step() == {3: (17, 0)}
    for _ in range(2):
        play.add(make_request(range(40), max_tokens=1))
    assert play.step() == {4: (40, 0), 5: (24, 0)}


def test_a_more_important_prompt_passes_one_under_way() -> None:
    """Rows go by rank: the newcomer is admitted and served first, then the other goes on."""
    play = Schedule(plain_limits(max_num_batched_tokens=16))
    play.add(make_request(range(32)))
    assert play.step() == {1: (16, 0)}
    play.add(replace(make_request(range(20)), priority=1))
    assert play.step() == {2: (16, 0)}
    assert play.step() == {2: (4, 0), 1: (12, 0)}


def test_a_place_is_taken_from_a_less_important_one() -> None:
    """With both places taken, priority 1 has one at once: the youngest of priority 0 makes room."""
    play = Schedule(plain_limits(max_num_seqs=2))
    for priority in (0, 0, 0, 1):
        play.add(replace(make_request([1, 2], max_tokens=4), priority=priority))
        if priority == 0:
            play.step()
    assert set(play.step()) == {1, 4}
    assert [sequence.seq_id for sequence in play.scheduler.waiting] == [2, 3]
    assert [set(play.step()) for _ in range(5)] == [{2, 4}, {2, 4}, {3, 4}, {3}, {3}]
    assert all(len(sequence.token_ids) == 6 for sequence in play.sequences[:2])


def test_a_prompt_under_way_keeps_its_blocks() -> None:
    """Between its chunks nobody else may have the memory that the rest of it was promised."""
    play = Schedule(plain_limits(max_model_len=16, block_size=4, max_num_batched_tokens=5))
    play.add(make_request(range(15)))
    play.step()
    assert len(play.scheduler.blocks.table(1)) == 4


def test_equal_priority_takes_no_place() -> None:
    """Nobody is put back for a newcomer of its own priority, or of a lower one."""
    play = Schedule(plain_limits(max_num_seqs=1))
    play.add(replace(make_request([1], max_tokens=9), priority=1))
    play.step()
    play.add(replace(make_request([1], max_tokens=9), priority=1))
    play.add(replace(make_request([1], max_tokens=9), priority=0))
    assert set(play.step()) == {1}


def test_memory_is_taken_from_less_important_ones_only_if_that_is_enough() -> None:
    """Two of priority 0 would make room, and do; one of priority 2 is not touched for that."""
    limits = plain_limits(max_model_len=16, block_size=4, num_blocks=6)
    play = Schedule(limits)
    for priority in (0, 2, 0):
        play.add(replace(make_request(range(7), max_tokens=1000), priority=priority))
    play.step()
    play.add(replace(make_request(range(10, 22)), priority=1))
    assert set(play.step()) == {2, 4}
    play = Schedule(limits)
    for priority in (2, 2, 0):
        play.add(replace(make_request(range(7), max_tokens=1000), priority=priority))
    play.step()
    play.add(replace(make_request(range(10, 22)), priority=1))
    assert set(play.step()) == {1, 2, 3}


def test_who_waited_long_is_not_put_back_for_those_it_had_to_wait_for() -> None:
    """A sequence that waited AGING_STEPS steps runs on, whoever of the next priority comes."""
    play = Schedule(plain_limits(max_num_seqs=1, max_model_len=2048, max_num_batched_tokens=2048))
    play.add(replace(make_request([1], max_tokens=AGING_STEPS + 1), priority=1))
    old = play.add(replace(make_request([1], max_tokens=50), priority=0))
    while not old.num_computed_tokens:
        play.step()
    play.add(replace(make_request([1], max_tokens=2), priority=1))
    assert set(play.step()) == {2}
    play.add(replace(make_request([1], max_tokens=2), priority=2))
    assert set(play.step()) == {4}


def test_a_preempted_sequence_finds_its_own_tokens_again() -> None:
    """It is computed again only as far as its blocks were needed meanwhile."""
    play = Schedule(make_limits(max_num_seqs=1, num_blocks=2))
    play.add(make_request(range(30), max_tokens=8))
    play.step()
    play.step()
    play.add(replace(make_request([1, 2], max_tokens=1), priority=1))
    assert play.step() == {2: (2, 0)}
    assert play.step() == {1: (1, 0)}
    assert play.sequences[0].num_cached_tokens == 0, "they are its own, no earlier request's"


def test_without_blocks_the_youngest_makes_room_and_starts_again() -> None:
    """It goes back to the head of the queue, computed tokens forgotten, emitted ones kept."""
    play = Schedule(plain_limits(max_model_len=16, block_size=4, num_blocks=4))
    for _ in range(2):
        play.add(make_request(range(8), max_tokens=8))
    play.add(make_request([1]))
    assert set(play.step()) == {1, 2}
    assert set(play.step()) == {1}
    assert [sequence.seq_id for sequence in play.scheduler.waiting] == [2, 3]
    second = play.sequences[1]
    assert (second.num_computed_tokens, len(second.token_ids)) == (0, 9)
    assert play.scheduler.schedule(play.policy).num_preempted == 0


def test_drafts_take_only_blocks_that_are_free() -> None:
    """Room for a draft never costs another sequence its own."""
    play = Schedule(plain_limits(max_model_len=16, block_size=4, num_blocks=4), k=16)
    play.add(make_request(range(8)))
    play.add(make_request([1, 2]))
    play.step()
    plan = play.scheduler.schedule(play.policy)
    assert [(turn.num_rows, turn.num_drafts) for turn in plan.turns] == [(1, 3), (1, 1)]
    assert plan.draft_limits == ("budget", "budget")


def test_nothing_is_reserved_without_drafts() -> None:
    """K = 0 takes no look-ahead block and asks nobody."""
    play = Schedule(plain_limits(max_model_len=16, block_size=4, num_blocks=4), k=0)
    play.add(make_request(range(3)))
    play.step()
    plan = play.scheduler.schedule(play.policy)
    assert plan.queries() == []
    assert play.scheduler.blocks.num_free == 3


@pytest.mark.parametrize(
    ("speculation", "num_drafts"),
    [
        (SpeculationParams(enabled=False), 0),
        (SpeculationParams(max_tokens=0), 0),
        (SpeculationParams(max_tokens=2), 2),
        (SpeculationParams(max_tokens=50), 5),
    ],
)
def test_the_request_caps_its_drafts(speculation: SpeculationParams, num_drafts: int) -> None:
    """The caller's cap is part of what is asked for: it is no limit that is counted."""
    play = Schedule(plain_limits(), k=5)
    play.add(make_request([1, 2], speculation=speculation))
    play.step()
    plan = play.scheduler.schedule(play.policy)
    assert plan.turns[0].num_drafts == num_drafts
    assert plan.draft_limits == ()


@pytest.mark.parametrize(
    ("max_tokens", "prompt_length", "draft_context", "budget", "expected"),
    [
        (4, 5, None, 64, (2, "max_tokens")),  # one was emitted, three are left, one is the bonus
        (None, 12, None, 64, (2, "target_context")),  # 13 of 16: two drafts and the bonus
        (None, 5, 8, 64, (2, "draft_context")),
        (None, 10, 8, 64, (0, "draft_context")),
        (None, 5, None, 5, (4, "budget")),
    ],
)
def test_the_limit_that_cut_a_draft_is_named(
    max_tokens: int | None,
    prompt_length: int,
    draft_context: int | None,
    budget: int,
    expected: tuple[int, str],
) -> None:
    """Every limit of a draft's length, alone, and the name it is counted under."""
    limits = plain_limits(max_model_len=16, max_num_batched_tokens=budget)
    play = Schedule(limits, k=8, draft_context=draft_context)
    play.add(make_request(range(prompt_length), max_tokens=max_tokens))
    while len(play.sequences[0].token_ids) == prompt_length:
        play.step()
    plan = play.scheduler.schedule(play.policy)
    assert (plan.turns[0].num_drafts, *plan.draft_limits) == expected
    assert expected[1] in DRAFT_LIMITS


@given(
    st.integers(1, 20), st.dictionaries(st.sampled_from("abcd"), st.integers(-3, 20), min_size=1)
)
def test_a_draft_is_the_least_of_all_and_never_negative(
    num_wanted: int, room: dict[str, int]
) -> None:
    """The clamp: min of wanted and every room, at least 0, named exactly when it cut."""
    size = size_draft(num_wanted, room)
    assert size.num_drafts == max(min(num_wanted, *room.values()), 0)
    assert (size.limited_by is None) == (size.num_drafts == num_wanted)
    if size.limited_by is not None:
        assert room[size.limited_by] == min(room.values())


def test_a_draft_that_fits_is_not_limited() -> None:
    """A room of exactly what is wanted cuts nothing."""
    assert size_draft(4, {"budget": 4}) == DraftSize(4)


def test_limits_that_cannot_hold_one_context_are_refused() -> None:
    """The oldest sequence must always be able to go on."""
    with pytest.raises(ConfigurationError, match="num_blocks"):
        plain_limits(max_model_len=16, block_size=4, num_blocks=3)
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens"):
        plain_limits(max_num_batched_tokens=0)
