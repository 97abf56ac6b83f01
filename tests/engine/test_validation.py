"""The engine takes nothing that could harm the others, and says which field it was."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.engine.validation import validate
from cluster.errors import ContextExceeded, InvalidRequest
from cluster.request import Request, SamplingParams, SpeculationParams
from tests.harness import make_limits, make_request

LIMITS = make_limits(max_model_len=16)


def sampled(**fields: Any) -> Request:  # noqa: ANN401 - any field of SamplingParams
    return make_request([1], sampling=replace(SamplingParams(seed=1), **fields))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request([]), "prompt"),
        (make_request([1, 32]), "prompt"),
        (make_request([-1]), "prompt"),
        (make_request(range(16)), "prompt"),
        (make_request([1], output_token_ids=(32,)), "output_token_ids"),
        (make_request(range(10), output_token_ids=(1,) * 7), "output_token_ids"),
        (make_request([1], max_tokens=0), "stopping.max_tokens"),
        (make_request([1], min_tokens=-1), "stopping.min_tokens"),
        (make_request([1], max_tokens=3, min_tokens=4), "stopping.min_tokens"),
        (make_request([1], stop_token_ids=(99,)), "stopping.stop_token_ids"),
        (
            make_request([1], speculation=SpeculationParams(max_tokens=-1)),
            "speculation.max_tokens",
        ),
        (sampled(temperature=-0.1), "sampling.temperature"),
        (sampled(temperature=float("nan")), "sampling.temperature"),
        (sampled(temperature=float("inf")), "sampling.temperature"),
        (sampled(top_k=-1), "sampling.top_k"),
        (sampled(top_p=0.0), "sampling.top_p"),
        (sampled(top_p=1.1), "sampling.top_p"),
        (sampled(min_p=-0.1), "sampling.min_p"),
        (sampled(min_p=1.1), "sampling.min_p"),
        (sampled(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (sampled(repetition_penalty=float("inf")), "sampling.repetition_penalty"),
        (sampled(repetition_penalty=float("nan")), "sampling.repetition_penalty"),
        (sampled(presence_penalty=-2.1), "sampling.presence_penalty"),
        (sampled(frequency_penalty=2.1), "sampling.frequency_penalty"),
        (sampled(frequency_penalty=float("nan")), "sampling.frequency_penalty"),
        (sampled(logit_bias=((32, 1.0),)), "sampling.logit_bias"),
        (sampled(logit_bias=((-1, 1.0),)), "sampling.logit_bias"),
        (sampled(logit_bias=((3, 100.5),)), "sampling.logit_bias"),
        (sampled(logit_bias=((3, float("nan")),)), "sampling.logit_bias"),
        (sampled(logit_bias=((3, 1.0), (3, 2.0))), "sampling.logit_bias"),
        (sampled(logit_bias=((3, 1.0),) * 1025), "sampling.logit_bias"),
        (sampled(allowed_token_ids=()), "sampling.allowed_token_ids"),
        (sampled(allowed_token_ids=(1, 32)), "sampling.allowed_token_ids"),
        (
            sampled(allowed_token_ids=(1, 2), banned_token_ids=(3, 2, 1)),
            "sampling.allowed_token_ids",
        ),
        (sampled(banned_token_ids=(32,)), "sampling.banned_token_ids"),
        (sampled(banned_token_ids=(1, 1)), "sampling.banned_token_ids"),
        (sampled(banned_sequences=((1,),)), "sampling.banned_sequences"),
        (sampled(banned_sequences=((1, 32),)), "sampling.banned_sequences"),
        (sampled(banned_sequences=((1,) * 65,)), "sampling.banned_sequences"),
        (sampled(banned_sequences=((1, 2),) * 257), "sampling.banned_sequences"),
        (replace(make_request([1]), top_logprobs=21), "top_logprobs"),
        (replace(make_request([1]), top_logprobs=-1), "top_logprobs"),
        (sampled(seed=-1), "sampling.seed"),
        (sampled(seed=2**64), "sampling.seed"),
    ],
)
def test_the_field_that_is_wrong_is_named(request_: Request, field: str) -> None:
    """Each field out of its range is an InvalidRequest with that field."""
    with pytest.raises(InvalidRequest) as caught:
        validate(request_, LIMITS)
    assert caught.value.field == field


def test_a_prompt_as_long_as_the_context_leaves_no_room() -> None:
    """x11: a prompt of max_model_len is refused, one token less is taken."""
    with pytest.raises(ContextExceeded) as caught:
        validate(make_request(range(16)), LIMITS)
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (16, 16)
    validate(make_request(range(15)), LIMITS)


def test_the_ends_of_all_ranges_are_served() -> None:
    """What is just allowed is allowed."""
    validate(make_request([0, 31], max_tokens=1, min_tokens=1, output_token_ids=(1,) * 14), LIMITS)
    validate(sampled(temperature=0.0, top_k=10**9, top_p=1.0, min_p=1.0, seed=2**64 - 1), LIMITS)
    validate(
        sampled(
            repetition_penalty=1e-9,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, -100.0), (31, 100.0)),
            allowed_token_ids=(0, 31),
            banned_token_ids=(31,),
            banned_sequences=((0, 0), (31,) * 64) * 128,
        ),
        LIMITS,
    )
    validate(replace(make_request([1]), top_logprobs=20), LIMITS)
