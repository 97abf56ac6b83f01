"""Who goes next: priority, age, and what waiting is worth."""

from dataclasses import replace

from cluster.engine.queue import AGING_STEPS, WaitingQueue, level
from cluster.engine.sequence import Sequence
from tests.harness import make_request


def sequence_of(seq_id: int, priority: int = 0) -> Sequence:
    return Sequence(
        replace(make_request([1]), priority=priority),
        seq_id=seq_id,
        emit=lambda _: None,
        eos_token_ids=frozenset(),
        max_model_len=16,
    )


def drained(queue: WaitingQueue, step_id: int) -> list[int]:
    """The ids in the order in which they go."""
    order = []
    while (first := queue.first(step_id)) is not None:
        queue.remove(first, step_id)
        order.append(first.seq_id)
    return order


def test_higher_priority_goes_first_and_within_one_the_older() -> None:
    """Whatever the order in which they came in."""
    queue = WaitingQueue()
    for seq_id, priority in ((4, 0), (1, 0), (3, 5), (2, -1), (5, 5)):
        queue.push(sequence_of(seq_id, priority), 1)
    assert len(queue) == 5
    assert sorted(sequence.seq_id for sequence in queue) == [1, 2, 3, 4, 5]
    assert drained(queue, 1) == [3, 5, 1, 4, 2]
    assert len(queue) == 0


def test_one_that_was_put_back_goes_before_later_arrivals_of_its_priority() -> None:
    """It need not have waited at all."""
    queue = WaitingQueue()
    queue.push(sequence_of(7), 1)
    queue.push(sequence_of(8), 1)
    queue.push(sequence_of(2), 100)
    assert drained(queue, 100) == [2, 7, 8]


def test_newcomers_pass_a_lower_priority_for_so_long_only() -> None:
    """Two priorities are worth 2 * AGING_STEPS steps: then the older is first. None starves."""
    queue = WaitingQueue()
    queue.push(sequence_of(1, priority=0), 10)
    for step_id in range(10, 10 + 2 * AGING_STEPS):
        newcomer = sequence_of(1000 + step_id, priority=2)
        queue.push(newcomer, step_id)
        assert queue.first(step_id) is newcomer
        queue.remove(newcomer, step_id)
    step_id = 10 + 2 * AGING_STEPS
    queue.push(sequence_of(5000, priority=2), step_id)
    assert drained(queue, step_id) == [1, 5000]


def test_what_was_waited_is_kept_and_running_adds_nothing() -> None:
    """A sequence's level rises in the queue and stays while it runs."""
    queue = WaitingQueue()
    sequence = sequence_of(1, priority=3)
    queue.push(sequence, 0)
    assert level(sequence, AGING_STEPS - 1) == 3
    queue.remove(sequence, AGING_STEPS + 5)
    assert level(sequence, 10 * AGING_STEPS) == 4
    queue.push(sequence, 10 * AGING_STEPS)
    assert level(sequence, 11 * AGING_STEPS - 6) == 4
    assert level(sequence, 11 * AGING_STEPS - 5) == 5
