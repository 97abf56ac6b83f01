"""The fixed policy."""

from cluster.control.policy import FixedPolicy


def test_every_sequence_is_asked_for_the_same_number() -> None:
    """The fixed policy looks at nothing."""
    assert FixedPolicy(3).choose([4, 9], num_rows=100) == {4: 3, 9: 3}


def test_nobody_is_asked_when_nobody_decodes() -> None:
    """No candidates, no answer."""
    assert FixedPolicy(3).choose([], num_rows=0) == {}
