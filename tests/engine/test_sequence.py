"""When a sequence ends, and what of a run survives."""

import pytest

from cluster.engine.sequence import Sequence
from cluster.request import FinishReason, Request
from tests.harness import make_request

EOS = 0


def make_sequence(request: Request, max_model_len: int = 100) -> Sequence:
    return Sequence(
        request,
        seq_id=1,
        emit=lambda _: None,
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
    )


def test_a_run_is_cut_after_the_first_token_that_ends_it() -> None:
    """EOS in the middle of an accepted run: what follows it is not added."""
    sequence = make_sequence(make_request([1, 2]))
    assert sequence.extend((5, 6, EOS, 7, 8)) == 3
    assert sequence.token_ids == [1, 2, 5, 6, EOS]
    assert sequence.finish_reason() is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
def test_max_tokens_cuts_a_run(max_tokens: int) -> None:
    """Exactly max_tokens are added, and the reason is the length."""
    sequence = make_sequence(make_request([1, 2], max_tokens=max_tokens))
    assert sequence.extend((5, 6, 7, 8, 9)) == max_tokens
    assert sequence.finish_reason() is FinishReason.LENGTH


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    """EOS and stop ids come before the length."""
    sequence = make_sequence(make_request([1, 2], max_tokens=2, stop_token_ids=(6,)))
    assert sequence.extend((5, 6, 7)) == 2
    assert sequence.finish_reason() is FinishReason.STOP


def test_the_context_ends_a_sequence_without_max_tokens() -> None:
    """With a context of 4, two tokens follow a prompt of two."""
    sequence = make_sequence(make_request([1, 2], max_tokens=None), max_model_len=4)
    assert sequence.max_tokens_left == 2
    assert sequence.extend((5, 6, 7)) == 2
    assert sequence.finish_reason() is FinishReason.LENGTH


def test_a_stop_id_in_the_prompt_ends_nothing() -> None:
    """Only what was generated can end a sequence."""
    assert make_sequence(make_request([1, EOS])).finish_reason() is None


def test_ignored_eos_is_a_token_like_any_other_but_stop_ids_still_stop() -> None:
    """`ignore_eos` is about EOS alone."""
    sequence = make_sequence(make_request([1], ignore_eos=True, stop_token_ids=(9,)))
    assert sequence.extend((EOS, EOS, 9, 4)) == 3
    assert sequence.finish_reason() is FinishReason.STOP


def test_min_tokens_keeps_eos_and_stop_ids_away_from_its_positions() -> None:
    """The target is told the ids and the first absolute position where they may be drawn."""
    sampling = make_sequence(make_request([1, 2, 3], min_tokens=4, stop_token_ids=(9,))).sampling
    assert sampling.suppressed_token_ids == (EOS, 9)
    assert sampling.suppressed_before == 7


def test_min_tokens_does_not_keep_away_what_would_not_end_the_sequence() -> None:
    """With `ignore_eos`, EOS may be drawn from the start."""
    request = make_request([1], min_tokens=4, stop_token_ids=(9,), ignore_eos=True)
    assert make_sequence(request).sampling.suppressed_token_ids == (9,)


def test_earlier_output_is_context_and_counts_against_the_limits() -> None:
    """A moved request has the tokens left that it had, and its positions where they were."""
    moved = make_sequence(make_request([1, 2], output_token_ids=(5, 6), max_tokens=5, min_tokens=3))
    assert moved.token_ids == [1, 2, 5, 6]
    assert moved.max_tokens_left == 3
    assert moved.sampling.suppressed_before == 5
