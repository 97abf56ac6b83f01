"""What a second is worth: an average over many steps of about the same load."""

import pytest

from cluster.control.cost import CostTable
from cluster.control.long_run import LongRun
from cluster.control.policy import Outcome, StepRecord, StepShape
from cluster.messages import Draft


def shape(num_sequences: int) -> StepShape:
    """All of them decode."""
    return StepShape(num_sequences=num_sequences, num_rows=num_sequences, num_context_tokens=0)


def table(seconds: float = 0.01) -> CostTable:
    """Every row adds a tenth of what the first takes."""
    return CostTable({shape(rows): seconds * (1 + 0.1 * rows) for rows in (1, 8, 64)})


def record(num_sequences: int, num_drafts: int, num_accepted: int) -> StepRecord:
    """Each sequence brought so many drafts, of which so many were kept."""
    draft = Draft((1,) * num_drafts)
    return StepRecord(
        shape=shape(num_sequences),
        outcomes=tuple(
            Outcome(seq_id=seq_id, draft=draft, num_accepted=num_accepted)
            for seq_id in range(num_sequences)
        ),
        draft_seconds=0.0,
        target_seconds=0.01,
    )


def test_it_is_tokens_over_seconds_of_all_steps_and_not_the_mean_of_their_rates() -> None:
    """Half the steps bring 5 tokens in 1.5/1.1 of the time, half one token in as much."""
    long_run, cost = LongRun(), table()
    for step in range(1000):
        long_run.observe(record(1, 4, 4 * (step % 2)), cost)
    assert long_run.speedup(1, expected=1.0) == pytest.approx(3 / (1.5 / 1.1), rel=0.05)


def test_it_does_not_fall_with_the_machine() -> None:
    """Twice as slow is twice as slow for plain steps too."""
    fast, slow = LongRun(), LongRun()
    usual, dear = table(0.01), table(0.02)
    for _ in range(100):
        fast.observe(record(2, 4, 2), usual)
        slow.observe(record(2, 4, 2), dear)
    assert fast.speedup(2, expected=1.0) == pytest.approx(slow.speedup(2, expected=1.0))


def test_loads_are_apart() -> None:
    """What was seen alone says nothing of a full batch; of one more sequence it does."""
    long_run, cost = LongRun(), table()
    for _ in range(200):
        long_run.observe(record(2, 4, 4), cost)
    assert long_run.speedup(64, expected=1.2) == 1.2
    assert long_run.speedup(3, expected=1.2) == long_run.speedup(2, expected=1.2) > 2


def test_plain_steps_can_always_be_had() -> None:
    """No second is worth less than that, however much was wasted."""
    long_run, cost = LongRun(), table()
    for _ in range(200):
        long_run.observe(record(1, 8, 0), cost)
    assert long_run.speedup(1, expected=1.0) == 1.0
