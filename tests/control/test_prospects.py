"""What to expect of a sequence's next draft, and when to try one that does not pay."""

import numpy as np

from cluster.control.prospects import FIRST_BACKOFF, LAST_BACKOFF, LAST_LOOK_WAIT, Prospects


def tokens(count: int) -> np.ndarray:
    """One sequence's."""
    return np.array([count])


def test_its_own_first_draft_says_more_than_those_of_others() -> None:
    """A new sequence is as the last ones were only until it has brought something itself."""
    prospects = Prospects(4)
    others = prospects.rows(range(40))
    prospects.record(others, np.full((40, 4), 0.01), np.full(40, 4))
    for _ in range(20):
        prospects.record(others[:1], np.full((1, 4), 0.01), np.full(1, 4))
    own = prospects.rows([99])
    assert prospects.drafts(own).mean() < 0.4
    prospects.record(own, np.full((1, 4), 0.9), np.full(1, 4))
    assert prospects.drafts(own).mean() > 0.8


def test_it_is_tried_after_more_and_more_tokens_until_something_is_kept() -> None:
    """8, 16, 32, ... up to the last; a kept token begins it anew."""
    prospects = Prospects(4)
    row = prospects.rows([1])
    waits, last = [], 0
    for now in range(1000):
        if prospects.due(row, tokens(now))[0]:
            waits.append(now - last)
            last = now
            prospects.tried(row, tokens(now))
    assert waits[1:6] == [8, 16, 32, 64, 128]
    assert max(waits) == LAST_BACKOFF
    prospects.encouraged(row)
    assert prospects.due(row, tokens(last + FIRST_BACKOFF))[0]


def test_what_was_put_off_can_be_tried_as_soon_as_ever() -> None:
    """Where there is much to spend, eight tokens are enough."""
    prospects = Prospects(4)
    row = prospects.rows([1])
    for now in (0, 8, 24, 56):
        prospects.tried(row, tokens(now))
    assert not prospects.due(row, tokens(56 + FIRST_BACKOFF))[0]
    assert prospects.due(row, tokens(56 + FIRST_BACKOFF), soon=True)[0]
    assert not prospects.due(row, tokens(56 + FIRST_BACKOFF - 1), soon=True)[0]


def test_looks_are_together_and_never_far_apart_unless_they_cost() -> None:
    """Those due soon are asked in the same message; `wait` puts them off."""
    prospects = Prospects(4)
    rows = prospects.rows([1, 2])
    prospects.looked(rows, np.array([100, 104]), wait=0)
    assert not prospects.worth_a_look(rows, np.array([107, 107])).any()
    assert prospects.worth_a_look(rows, np.array([108, 108])).all()
    for now in range(200, 300, 20):
        prospects.looked(rows, np.array([now, now]), wait=0)
    assert prospects.worth_a_look(rows, np.array([280, 280]) + LAST_LOOK_WAIT).all()
    prospects.looked(rows, np.array([300, 300]), wait=200)
    assert not prospects.worth_a_look(rows, np.array([499, 499])).any()
