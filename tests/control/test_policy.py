"""The fixed policy."""

from cluster.control.policy import Candidate, FixedPolicy, StepShape
from cluster.messages import Draft

SHAPE = StepShape(num_sequences=2, num_rows=2, num_context_tokens=20)


def test_every_sequence_is_asked_for_the_same_number() -> None:
    """The fixed policy looks at nothing."""
    candidates = [Candidate(seq_id=seq_id, num_tokens=10) for seq_id in (4, 9)]
    assert FixedPolicy(3).choose(candidates, SHAPE) == {4: 3, 9: 3}


def test_nobody_is_asked_when_nobody_decodes() -> None:
    """No candidates, no answer."""
    assert FixedPolicy(3).choose([], SHAPE) == {}


def test_all_that_came_is_verified() -> None:
    """Also a draft that is shorter than asked for, or empty."""
    assert FixedPolicy(3).admit({4: Draft((1, 2)), 9: Draft()}, SHAPE) == {4: 2, 9: 0}
