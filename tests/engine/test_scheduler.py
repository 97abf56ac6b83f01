"""Who runs in a step: the budget, the places, the blocks and the drafts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.policy import FixedPolicy
from cluster.engine.limits import EngineLimits
from cluster.engine.plan import Plan
from cluster.engine.scheduler import DraftSize, Scheduler, size_draft
from cluster.engine.sequence import Sequence
from cluster.errors import ConfigurationError
from cluster.metrics import DRAFT_LIMITS
from cluster.request import Request, SpeculationParams
from tests.harness import make_limits, make_request


class Schedule:
    """A scheduler that is played without a target: every sampled sequence gets token 1."""

    def __init__(self, limits: EngineLimits, k: int = 0, draft_context: int | None = None) -> None:
        self.scheduler = Scheduler(limits, draft_context_limit=draft_context)
        self.limits = limits
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
        plan = self.scheduler.schedule(self.policy)
        self.commit(plan)
        return {turn.sequence.seq_id: (turn.num_rows, turn.num_drafts) for turn in plan.turns}

    def commit(self, plan: Plan) -> None:
        """Every row was computed, every draft rejected."""
        total = sum(turn.num_rows + turn.num_drafts for turn in plan.turns)
        assert 0 < total <= self.limits.max_num_batched_tokens
        for turn in plan.turns:
            samples = turn.samples
            turn.sequence.num_computed_tokens += turn.num_rows
            if samples:
                turn.sequence.extend((1,))
                if turn.sequence.finish_reason() is not None:
                    self.scheduler.remove(turn.sequence)


def test_prompts_fill_what_decodes_leave_of_the_budget() -> None:
    """A decode has its row, a prompt of 20 takes the other 7, and goes on where it stopped."""
    play = Schedule(make_limits(max_num_batched_tokens=8))
    play.add(make_request([1, 2, 3]))
    assert play.step() == {1: (3, 0)}
    play.add(make_request(range(20)))
    assert play.step() == {1: (1, 0), 2: (7, 0)}
    assert play.step() == {1: (1, 0), 2: (7, 0)}
    assert play.step() == {1: (1, 0), 2: (6, 0)}
    assert play.step() == {1: (1, 0), 2: (1, 0)}


def test_drafts_are_for_sequences_with_one_uncomputed_token() -> None:
    """x09: a prompt in three chunks brings drafts only after the last."""
    play = Schedule(make_limits(max_num_batched_tokens=8), k=3)
    play.add(make_request(range(20)))
    assert [play.step()[1] for _ in range(4)] == [(8, 0), (8, 0), (4, 0), (1, 3)]


def test_drafts_and_prompts_share_what_the_first_rows_leave() -> None:
    """Neither starves: with both pressing, each gets about half."""
    play = Schedule(make_limits(max_num_batched_tokens=9, max_num_seqs=2), k=16)
    play.add(make_request([1]))
    play.step()
    play.add(make_request(range(31)))
    assert play.step() == {1: (1, 4), 2: (4, 0)}
    play.sequences[1].num_computed_tokens = 30
    assert play.step() == {1: (1, 7), 2: (1, 0)}


def test_a_running_sequence_never_skips_a_step() -> None:
    """x08: six sequences and prompts press on three rows; whoever runs has a row in each step."""
    play = Schedule(make_limits(max_num_batched_tokens=3, max_num_seqs=6), k=4)
    for length in (1, 9, 1, 4, 1, 2):
        play.add(make_request(range(length), max_tokens=7))
    while play.scheduler.has_work:
        running = {sequence.seq_id for sequence in play.scheduler.running}
        assert running <= set(play.step())
    assert all(len(s.token_ids) == len(s.request.prompt_token_ids) + 7 for s in play.sequences)


def test_the_oldest_prompt_is_finished_first() -> None:
    """Of two prompts under way the older takes what is left; the younger goes on by one row."""
    play = Schedule(make_limits(max_num_batched_tokens=8, max_num_seqs=2))
    play.add(make_request(range(20)))
    play.step()
    play.add(make_request(range(20)))
    play.scheduler._admit_next()
    assert play.step() == {1: (7, 0), 2: (1, 0)}


def test_places_are_given_in_the_order_of_arrival() -> None:
    """With two places the third waits until one has ended."""
    play = Schedule(make_limits(max_num_seqs=2))
    for _ in range(3):
        play.add(make_request([1, 2], max_tokens=2))
    assert set(play.step()) == {1, 2}
    assert play.scheduler.num_queued == 1
    assert set(play.step()) == {1, 2}
    assert set(play.step()) == {3}


def test_a_sequence_is_admitted_only_when_its_whole_prompt_has_blocks() -> None:
    """The head of the queue waits for its blocks, and nobody overtakes it."""
    play = Schedule(make_limits(max_model_len=16, block_size=4, num_blocks=4))
    play.add(make_request(range(9), max_tokens=1))
    play.add(make_request(range(6)))
    play.add(make_request([1]))
    assert set(play.step()) == {1}
    assert set(play.step()) == {2, 3}


def test_without_blocks_the_youngest_makes_room_and_starts_again() -> None:
    """It goes back to the head of the queue, computed tokens forgotten, emitted ones kept."""
    play = Schedule(make_limits(max_model_len=16, block_size=4, num_blocks=4))
    for _ in range(2):
        play.add(make_request(range(8), max_tokens=8))
    play.add(make_request([1]))
    assert set(play.step()) == {1, 2}
    assert set(play.step()) == {1}
    assert [sequence.seq_id for sequence in play.scheduler.waiting] == [2, 3]
    second = play.sequences[1]
    assert (second.num_computed_tokens, len(second.token_ids)) == (0, 9)


def test_drafts_take_only_blocks_that_are_free() -> None:
    """Room for a draft never costs another sequence its own."""
    play = Schedule(make_limits(max_model_len=16, block_size=4, num_blocks=4), k=16)
    play.add(make_request(range(8)))
    play.add(make_request([1, 2]))
    play.step()
    plan = play.scheduler.schedule(play.policy)
    assert [(turn.num_rows, turn.num_drafts) for turn in plan.turns] == [(1, 3), (1, 1)]
    assert plan.draft_limits == ("budget", "budget")


def test_nothing_is_reserved_without_drafts() -> None:
    """K = 0 takes no look-ahead block and asks nobody."""
    play = Schedule(make_limits(max_model_len=16, block_size=4, num_blocks=4), k=0)
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
    play = Schedule(make_limits(), k=5)
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
    limits = make_limits(max_model_len=16, max_num_batched_tokens=budget)
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
        make_limits(max_model_len=16, block_size=4, num_blocks=3)
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens"):
        make_limits(max_num_batched_tokens=0)
