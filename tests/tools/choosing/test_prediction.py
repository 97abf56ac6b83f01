"""Predictions and words on costs and drafts that are made up. Pure: nothing is timed."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.cost import CostTable
from cluster.control.draft_cost import DraftCost
from cluster.control.policy import Outcome, StepRecord, StepShape
from cluster.messages import Draft
from cluster.tools.bench.figures import Rounds, Spent, Wave
from cluster.tools.bench.streams import Arrival, Stream
from cluster.tools.choosing.calibration import Observed, correct, prices_of, token_seconds
from cluster.tools.choosing.comparison import Candidate, Cell, Comparison
from cluster.tools.choosing.comparison_words import words_of
from cluster.tools.choosing.drafted import Steps, together
from cluster.tools.choosing.facts import StepCosts
from cluster.tools.choosing.prediction import (
    Planned,
    Prices,
    expected_under_control,
    predicted_seconds,
)

K = 4
ALL = Steps(((K, K),) * 10)
NONE = Steps(((K, 0),) * 10)
MIXED = Steps(((4, 0), (4, 1), (4, 4), (2, 2), (0, 0), (4, 2)))


def table(per_row: float) -> CostTable:
    """A step of one row takes 10 ms, and each row more so much more of that."""
    return CostTable(
        {
            StepShape(num_sequences=1, num_rows=rows, num_context_tokens=1): (
                0.01 * (1 + per_row * (rows - 1))
            )
            for rows in (1, 2, 4, 8, 16, 64, 256)
        }
    )


def prices(per_row: float = 0.0, rest: float = 0.0) -> Prices:
    """Drafts that are there at once."""
    return Prices(table(per_row), DraftCost(), StepCosts.of([(1, rest)]))


def seconds(steps: Steps, k: int, what: Prices, *, tokens: int = 41, at_once: int = 1) -> float:
    """Of one wave of answers of so many tokens."""
    wave = [Planned(20, tokens, "kind")] * at_once
    return predicted_seconds(
        [wave], {"kind": steps}, what, num_speculative_tokens=k, max_tokens=tokens
    )


def test_free_rows_and_right_drafts_take_a_fifth_of_the_steps() -> None:
    """Forty tokens are eight steps of five, each as long as a plain one with its rest."""
    what = prices(rest=0.002)
    assert seconds(ALL, 0, what) == pytest.approx(40 * 0.012, rel=0.01)
    assert seconds(ALL, K, what) == pytest.approx(8 * 0.012, rel=0.01)


def test_wrong_drafts_cost_their_rows_and_their_time() -> None:
    """No token is gained, and every step pays for four rows and for the wait."""
    what = prices(per_row=0.1)
    for _ in range(200):
        what.draft.observe(1, K, 0.003)
    plain, drafted = seconds(NONE, 0, what), seconds(NONE, K, what)
    assert drafted / plain == pytest.approx(1.4 + 0.3, rel=0.1)


def test_a_batch_ends_with_its_last_answer() -> None:
    """Neighbours share steps; what is left of a batch makes smaller ones."""
    what = prices(per_row=1.0)
    one, two = (seconds(MIXED, 0, what, at_once=number) for number in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.05)
    free = prices()
    assert seconds(MIXED, K, free, at_once=4) >= seconds(MIXED, K, free, at_once=1)


@given(
    outcomes=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda two: (max(two), min(two))),
        min_size=1,
        max_size=12,
    ),
    k=st.integers(1, 8),
)
def test_steps_add_up(outcomes: list[tuple[int, int]], k: int) -> None:
    """Survival never rises with the position; cut drafts keep no more; parts make the whole."""
    steps = Steps(tuple(outcomes))
    cut = steps.first(k)
    assert len(cut.survival) <= k
    assert cut.survival == steps.survival[: len(cut.survival)]
    assert cut.acceptance_length <= steps.acceptance_length <= 9
    assert cut.num_kept <= cut.num_drafted
    assert together([steps, cut]).num_drafted == steps.num_drafted + cut.num_drafted
    reached = [sum(drafted >= at for drafted, _ in outcomes) for at in range(1, 9)]
    kept = [chance * number for chance, number in zip(steps.survival, reached, strict=False)]
    assert sum(kept) == pytest.approx(steps.num_kept)
    assert all(before >= after - 1e-9 for before, after in pairwise(kept))


@pytest.mark.parametrize("per_row", [0.0, 0.05, 0.5])
def test_the_controller_expects_no_less_than_nothing(per_row: float) -> None:
    """Poor drafts are not made, good ones are, and less under more load."""
    what = prices(per_row)
    poor = expected_under_control({"kind": NONE}, what, num_sequences=1, context=10)
    assert (poor.depth, poor.speedup) == (0, 1)
    gains = [
        expected_under_control({"kind": MIXED}, what, num_sequences=number, context=10).speedup
        for number in (1, 4, 16, 64)
    ]
    assert all(gain >= 1 for gain in gains)
    assert all(before >= after * 0.97 for before, after in pairwise(gains))
    assert gains[0] > 1 or per_row == 0.5


def record(num_drafted: int, *, target: float, wait: float) -> StepRecord:
    """A step of one sequence."""
    draft = Draft(tuple(range(num_drafted)))
    return StepRecord(
        shape=StepShape(num_sequences=1, num_rows=1, num_context_tokens=20),
        outcomes=(Outcome(seq_id=1, draft=draft, num_accepted=0),),
        draft_seconds=wait,
        target_seconds=target,
    )


def test_prices_are_those_of_the_engine() -> None:
    """The table follows the steps, drafts cost what was waited, the rest is what is left."""
    plain = Observed((record(0, target=0.02, wait=0.0),) * 100, 100 * 0.025)
    drafting = Observed((record(4, target=0.02, wait=0.008),) * 100, 100 * 0.033)
    what = table(0.0)
    correct(what, [plain, drafting])
    found = prices_of(what, [plain], [drafting])
    shape = StepShape(num_sequences=1, num_rows=1, num_context_tokens=20)
    assert found.target.seconds(shape) == pytest.approx(0.02, rel=0.02)
    assert found.draft.seconds(1, 4) == pytest.approx(0.008, rel=0.1)
    assert found.rest.seconds(1) == pytest.approx(0.005)
    assert token_seconds([drafting]) == pytest.approx(0.002)
    assert prices_of(what, [], []).rest.seconds(8) == 0


def rounds(token_seconds_: float, *, drafts: Sequence[tuple[int, int]] = ()) -> Rounds:
    """One answer of 21 tokens, one at a time."""
    stream = Stream(0.0, token_ids=list(range(21)), drafts=[(0, 0), *drafts])
    stream.arrivals = [Arrival(1.0 + place * token_seconds_, 1) for place in range(21)]
    stream.num_drafted = sum(drafted for drafted, _ in drafts)
    stream.num_accepted = sum(kept for _, kept in drafts)
    spent = Spent(20, draft=20 * 0.004, forward=20 * 0.03)
    return Rounds(((Wave((stream,), stream.arrivals[-1].seconds, spent),),))


def candidate(draft: str, kept: int, speedups: Sequence[float]) -> Candidate:
    """A draft of which so many of ten tokens are kept, as fast at 1, 4 and 8 at once."""
    steps = Steps(((10, kept),) * 4)
    cells = tuple(
        Cell(
            concurrency=concurrency,
            num_speculative_tokens=4,
            rounds=rounds(0.05 / speedup, drafts=steps.outcomes),
            off=rounds(0.05),
            predicted=speedup * 1.1,
            wasted_seconds=0.009,
        )
        for concurrency, speedup in zip((1, 4, 8), speedups, strict=True)
    )
    return Candidate(draft, memory_bytes=2**20, kinds={"chat": steps}, cells=cells)


def words(*candidates: Candidate) -> tuple[str, ...]:
    """What is said of them."""
    return words_of(Comparison("t", 0.0, 64, candidates))


def test_the_fastest_is_taken_until_none_pays() -> None:
    """At each concurrency the one that was measured fastest; none where all lose."""
    said = words(candidate("a", 9, (2.0, 1.2, 0.8)), candidate("b", 8, (1.5, 1.4, 0.9)))
    assert said[0].startswith("1 at once: take a with K=4: 2.00 times as fast")
    assert said[1].startswith("4 at once: take b with K=4: 1.40 times as fast")
    assert said[2].startswith("8 at once: take no drafts. The best, b with K=4")
    assert any(each.startswith("a stops paying at 8 at once") for each in said)


@pytest.mark.parametrize(
    ("kept", "warned", "explained"), [(9, 0, 0), (6, 0, 0), (5, 2, 0), (4, 1, 1)]
)
def test_what_is_thrown_away_is_mentioned_and_explained(
    kept: int, warned: int, explained: int
) -> None:
    """Under 60 percent a warning, under 50 what it costs; the choice is by speed alone."""
    said = words(candidate("a", kept, (1.5, 1.2, 1.1)))
    assert sum(each.startswith("Mind a on") for each in said) == warned
    costs = [each for each in said if each.startswith("a: ")]
    assert len(costs) == explained
    if explained:
        assert (
            "of a step's 34.0 ms rows that are thrown away take 9.0 and making them 2.4" in costs[0]
        )
        assert "1.50x" in costs[0]
    assert said[0].startswith("1 at once: take a")


def test_errors_are_of_the_measurement() -> None:
    """A prediction of 1.1 times what was measured is ten percent off."""
    for cell in candidate("a", 5, (2.0, 1.0, 0.5)).cells:
        assert cell.error == pytest.approx(0.1, abs=1e-6)
