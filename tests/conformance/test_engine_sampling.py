"""X40 to X42 on a real transformer: every sampling field, with drafts and without, through engines.

"Same" is as in `test_engine_model`; here top logprobs are asked for, and compared as well.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.messages import SamplingSpec, TopLogprobs
from cluster.request import FinishReason, Request, SamplingParams
from tests.conformance.inputs import (
    BANNED,
    EAGER_TO_END,
    FIELDS,
    assert_always_right,
    limits_of,
    scored_requests,
)
from tests.conformance.lab import EOS_TOKEN_ID, VOCAB_SIZE, Lab
from tests.conformance.rows import OneRow
from tests.harness import GREEDY, Recorder, make_request
from tests.sampling.reference import reference_logits

FAVOURITE = 255  # what a plain greedy answer to some of the prompts holds
LIMITS = limits_of(max_num_batched_tokens=48)

every_drafter = pytest.mark.parametrize(
    "drafter", ["same", "sibling", "random", "ngram", "remote same"]
)


def top_of(recorder: Recorder) -> list[TopLogprobs]:
    return [top for delta in recorder.deltas for top in delta.top_logprobs]


async def checked(
    lab: Lab, asked: Sequence[Request], drafter: str, *, k: int = 5
) -> list[Recorder]:
    """The answers with a drafter, which are those without to the last bit."""
    recorders = await lab.recorders(asked, drafter, k=k, limits=LIMITS)
    await lab.check_same(recorders, LIMITS)
    return recorders


@every_drafter
@pytest.mark.parametrize("name", FIELDS)
async def test_x40_x41_every_field_is_the_same_with_drafts(
    lab: Lab, name: str, drafter: str
) -> None:
    """Penalties, biases, allowed ids and min-p: Same for every kind of drafter."""
    recorders = await checked(lab, scored_requests(FIELDS[name]), drafter)
    if drafter in ("same", "remote same"):  # they draw as the target does, penalties and all
        assert_always_right(recorders)


@pytest.mark.parametrize("drafter", ["same", "random"])
async def test_x40_min_tokens_hold_eos_back(lab: Lab, drafter: str) -> None:
    """EOS biased up by 100 and min_tokens 20: 20 tokens, then EOS as soon as it may come."""
    asked = scored_requests(EAGER_TO_END, max_tokens=40, min_tokens=20)
    for recorder in await checked(lab, asked, drafter):
        answer = recorder.answer()
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids.index(EOS_TOKEN_ID) == 20 == answer.num_tokens - 1


async def test_x41_what_is_banned_never_appears(lab: Lab) -> None:
    """Biased by -100 or banned, neither an id nor a pair comes in 200 tokens; allowed ids only."""
    rng = random.Random(3)
    prompt = rng.choices(range(3, VOCAB_SIZE), k=9)
    request = replace(
        make_request(prompt, sampling=BANNED, max_tokens=200, ignore_eos=True), top_logprobs=5
    )
    for drafter in ("same", "ngram"):
        [recorder] = await checked(lab, [request], drafter)
        token_ids = recorder.answer().token_ids
        assert len(token_ids) == 200
        assert set(token_ids) == {21, 23, 24, 25}
        pairs = set(pairwise(token_ids))
        assert not pairs & {(21, 21), (23, 24)}
        assert len(pairs) > 10  # of the 14 others


@pytest.fixture(scope="module")
def unwelcome(lab: Lab) -> Request:
    """A greedy request of 200 tokens, the first token of whose plain answer is biased by -100."""
    prompt = random.Random(3).choices(range(3, VOCAB_SIZE), k=9)
    request = make_request(prompt, max_tokens=200, ignore_eos=True)
    [plain] = asyncio.run(lab.recorders([request], "off", k=0, limits=LIMITS))
    best = plain.answer().token_ids[0]
    assert plain.answer().token_ids.count(best) > 1
    return replace(request, sampling=replace(GREEDY, logit_bias=((best, -100.0),)))


@every_drafter
async def test_x41_the_best_token_biased_away_never_appears(
    lab: Lab, unwelcome: Request, drafter: str
) -> None:
    """In 200 greedy tokens, whatever drafts; Same."""
    [recorder] = await checked(lab, [unwelcome], drafter)
    [(token_id, _)] = unwelcome.sampling.logit_bias
    assert recorder.answer().num_tokens == 200
    assert token_id not in recorder.answer().token_ids
    assert recorder.num_drafted > 0


async def test_x41_min_p_keeps_what_is_a_tenth_as_probable_as_the_best(lab: Lab) -> None:
    """At temperature 1 every emitted token is, by the target's own logprobs."""
    for recorder in await checked(lab, scored_requests(FIELDS["min_p"], max_tokens=60), "sibling"):
        for logprob, top in zip(recorder.answer().logprobs, top_of(recorder), strict=True):
            assert logprob >= top[0][1] + math.log(0.1) - 1e-5


@every_drafter
async def test_x42_logprobs_are_the_targets_own_in_one_order(lab: Lab, drafter: str) -> None:
    """Five at T = 0: the emitted token first, falling, never zero, Same with drafts."""
    for recorder in await checked(lab, scored_requests(GREEDY), drafter):
        answer = recorder.answer()
        assert len(top_of(recorder)) == answer.num_tokens
        for token_id, logprob, top in zip(
            answer.token_ids, answer.logprobs, top_of(recorder), strict=True
        ):
            assert top[0] == (token_id, logprob)
            values = [value for _, value in top]
            assert values == sorted(values, reverse=True)
            assert len(top) == 5
            assert all(value < 0 for value in values)


async def test_x40_penalties_count_what_they_say(lab: Lab) -> None:
    """Not only the same with and without drafts: equal to a slow reference over the whole text.

    The prompt counts for repetition only, the answer for all; each position alone, no engine.
    """
    sampling = SamplingParams(
        seed=7,
        temperature=0.0,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias=((11, 1.0),),
        banned_sequences=((FAVOURITE, 11),),
    )
    for recorder in await checked(lab, scored_requests(sampling), "sibling"):
        prompt = recorder.request.prompt_token_ids
        assert recorder.answer().token_ids == slowly(lab, prompt, sampling, num_tokens=24)


def slowly(
    lab: Lab, prompt: Sequence[int], sampling: SamplingParams, *, num_tokens: int
) -> tuple[int, ...]:
    """A greedy answer by the slow reference, one row at a time."""
    spec = SamplingSpec(
        seed=0,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        banned_sequences=sampling.banned_sequences,
        num_prompt_tokens=len(prompt),
    )
    rows = OneRow(lab.decoders["target"])
    text = list(prompt)
    for position in range(len(prompt) + num_tokens - 1):
        logits = rows.logits(text[position], position)
        if position >= len(prompt) - 1:
            values = reference_logits(logits[0].tolist(), spec, position + 1, text)
            text.append(values.index(max(values)))
            if text[-1] == EOS_TOKEN_ID:
                break
    return tuple(text[len(prompt) :])
