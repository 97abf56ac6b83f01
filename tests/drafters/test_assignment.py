"""Which worker follows which sequence, whatever comes and goes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.drafters.assignment import Assignment

WORKERS = [f"w{place}" for place in range(4)]


class ComingAndGoing(RuleBasedStateMachine):
    """A model that is a plain dictionary of who is where."""

    def __init__(self) -> None:
        super().__init__()
        self.assignment = Assignment()
        self.workers: list[str] = []
        self.where: dict[int, str] = {}
        self.others: dict[str, int] = {}

    @rule(workers=st.sets(st.sampled_from(WORKERS)), others=st.integers(0, 3))
    def lease(self, workers: set[str], others: int) -> None:
        """Other workers than before: those that leave give up their sequences."""
        for gone in sorted(set(self.workers) - workers):
            left = self.assignment.leave(gone)
            assert sorted(left) == sorted(s for s, where in self.where.items() if where == gone)
            self.where = {s: where for s, where in self.where.items() if where != gone}
        self.workers = sorted(workers)
        self.others = {worker: others * place for place, worker in enumerate(self.workers)}
        told = {worker: self.others[worker] + self.num_own(worker) for worker in self.workers}
        self.assignment.set_workers(told)

    @rule(seq_id=st.integers(0, 9))
    def place(self, seq_id: int) -> None:
        """A known sequence stays; a new one goes where there is least to do."""
        if not self.workers:
            return
        chosen = self.assignment.place(seq_id, self.workers)
        if seq_id in self.where:
            assert chosen == self.where[seq_id]
            return
        loads = {each: self.others[each] + self.num_own(each) for each in self.workers}
        assert loads[chosen] == min(loads.values())
        self.where[seq_id] = chosen

    @rule(seq_id=st.integers(0, 9))
    def release(self, seq_id: int) -> None:
        """An ended sequence is named to the worker that has it, once."""
        assert self.assignment.release(seq_id) == self.where.pop(seq_id, None)
        assert self.assignment.release(seq_id) is None

    @invariant()
    def each_is_at_one_worker_in_use(self) -> None:
        """As the model says."""
        for seq_id in range(10):
            assert self.assignment.worker_of(seq_id) == self.where.get(seq_id)
        assert set(self.where.values()) <= set(self.workers)

    def num_own(self, worker: str) -> int:
        """Sequences there."""
        return list(self.where.values()).count(worker)


TestComingAndGoing = ComingAndGoing.TestCase
TestComingAndGoing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_new_worker_gets_its_share_of_what_is_new() -> None:
    """It has the fewest, so new sequences go there until it has as many; none is moved."""
    assignment = Assignment()
    assignment.set_workers({"old": 0})
    for seq_id in range(4):
        assignment.place(seq_id, ["old"])
    assignment.set_workers({"old": 4, "new": 0})
    placed = [assignment.place(seq_id, ["old", "new"]) for seq_id in range(4, 10)]
    assert placed.count("new") == 5
    assert [assignment.worker_of(seq_id) for seq_id in range(4)] == ["old"] * 4


def test_other_engines_sequences_count() -> None:
    """A worker that is full of another engine's is not the least loaded."""
    assignment = Assignment()
    assignment.set_workers({"shared": 5, "idle": 0})
    assert [assignment.place(seq_id, ["shared", "idle"]) for seq_id in range(5)] == ["idle"] * 5


def test_own_sequences_are_not_counted_twice() -> None:
    """What a worker says it holds includes what this engine has there."""
    assignment = Assignment()
    assignment.set_workers({"a": 0, "b": 0})
    assert assignment.place(1, ["a", "b"]) == "a"
    assignment.set_workers({"a": 1, "b": 1})  # b's is another engine's
    assert assignment.place(2, ["a", "b"]) == "b"
    assert assignment.place(3, ["a", "b"]) == "a"
