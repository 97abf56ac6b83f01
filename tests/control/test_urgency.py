"""A deadline that is near makes a sequence's drafts worth more rows."""

import numpy as np

from cluster.control.optimum import admitted
from cluster.control.outlook import _weighed, weight_of
from cluster.control.policy import Candidate


def test_urgency_multiplies_what_priority_says() -> None:
    """Weights and survivals both have it; without it nothing is computed."""
    candidates = [
        Candidate(seq_id=1, num_tokens=5, urgency=4.0),
        Candidate(seq_id=2, num_tokens=5, priority=2, urgency=2.0),
        Candidate(seq_id=3, num_tokens=5),
    ]
    drafts = np.full((2, 3, 4), 0.5, dtype=np.float32)
    _, weights, weighed = _weighed(candidates, drafts)
    assert weights.tolist() == [4.0, 2.0 * weight_of(2), 1.0]
    assert np.allclose(weighed[0, :, 0], 0.5 * weights)
    _, plain, same = _weighed(candidates[2:], drafts[:, 2:])
    assert plain.tolist() == [1.0]
    assert (same == drafts[:, 2:]).all()


def test_of_equal_drafts_the_urgent_one_is_verified_further() -> None:
    """Where rows are dear, as many as pay go to whom they help in time."""
    survivals = np.array([[0.6, 0.36, 0.22, 0.13]] * 2)
    costs = 0.1 + 0.03 * np.arange(9)
    counts = admitted(survivals * np.array([[4.0], [1.0]]), costs, goodput=20.0)
    equal = admitted(survivals, costs, goodput=20.0)
    assert counts[0] > counts[1]
    assert counts[0] > equal[0]
    assert counts[1] <= equal[1]
