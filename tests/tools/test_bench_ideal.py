"""The closed forms of what timed parts could bring, against a simulation step by step."""

import random

import pytest

from cluster.tools.bench.ideal import Roofline, Setting


def setting(acceptance: float, num_sequences: int, k: int, draft: float) -> Setting:
    """A step of 40 ms with drafts of `draft` seconds a token."""
    return Setting(
        num_sequences=num_sequences,
        num_speculative_tokens=k,
        acceptance=acceptance,
        target=Roofline(0.04, per_row=0.001, ridge=8),
        draft=Roofline(draft),
        round_trip=0.002,
    )


def simulated(case: Setting, *, ahead: bool, num_steps: int = 20_000) -> float:
    """Tokens per second of drafts that are right by chance, one step after the other.

    A drafter that goes on while the target verifies guesses K drafts and the token after them;
    only if all sequences' guesses came true are the next drafts there, or under way.
    """
    chances = random.Random(1)
    k = case.num_speculative_tokens
    tokens, now, ready = 0, 0.0, k * case.draft_seconds  # drafts are ready so long after the step
    for _ in range(num_steps):
        now += case.round_trip + ready + case.target_seconds
        foreseen = True
        for _ in range(case.num_sequences):
            right = 0
            while right <= k and chances.random() < case.acceptance:
                right += 1
            tokens += min(right, k) + 1
            foreseen &= right > k
        made = (k + 1) * case.draft_seconds
        ready = max(made - case.target_seconds, 0) if foreseen and ahead else k * case.draft_seconds
    return tokens / now


CASES = [
    setting(acceptance, num_sequences, k, draft)
    for acceptance in (0.0, 0.5, 0.8, 0.95, 1.0)
    for num_sequences, k in ((1, 1), (1, 4), (2, 3), (4, 8))
    for draft in (0.001, 0.02)
]


@pytest.mark.parametrize("case", CASES)
def test_waiting_for_drafts(case: Setting) -> None:
    """The synchronous ideal is what a simulation brings."""
    assert simulated(case, ahead=False) == pytest.approx(case.synchronous_rate, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_drafting_ahead(case: Setting) -> None:
    """The overlapped ideal is what a simulation brings."""
    assert simulated(case, ahead=True) == pytest.approx(case.overlapped_rate, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_drafting_ahead_is_never_worse(case: Setting) -> None:
    """Going on costs nothing, and hides at most all drafting."""
    assert case.synchronous_rate <= case.overlapped_rate * (1 + 1e-9)
    drafting = case.num_speculative_tokens * case.draft_seconds
    whole = case.round_trip + drafting + case.target_seconds
    assert case.overlapped_rate <= case.synchronous_rate * whole / (whole - drafting) * (1 + 1e-9)


def test_without_drafts_a_step_is_a_token() -> None:
    """K = 0 is plain decoding in both forms, whatever the acceptance."""
    for acceptance in (0.0, 0.7, 1.0):
        plain = setting(acceptance, 4, 0, 0.01)
        assert plain.tokens_a_step == 1
        assert plain.synchronous_rate == plain.overlapped_rate == pytest.approx(4 / 0.042)


def test_rows_beyond_the_ridge_cost() -> None:
    """A roofline is flat up to its ridge, and then a line."""
    roofline = Roofline(0.02, per_row=0.001, ridge=4)
    assert [roofline.seconds(rows) for rows in (1, 4, 5, 10)] == pytest.approx(
        [0.02, 0.02, 0.021, 0.026]
    )
