"""X40 to X42 on a real transformer: every sampling field, with drafts and without, through engines.

"Same" is as in `test_engine_model`, and here the top logprobs are compared as well.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cluster.engine.limits import EngineLimits
from cluster.messages import SamplingSpec, TopLogprobs
from cluster.models.decoder import Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.request import FinishReason, Request, SamplingParams
from tests.conformance.lab import EOS_TOKEN_ID, Lab
from tests.harness import Recorder, make_limits, make_request
from tests.sampling.reference import reference_logits

VOCAB_SIZE = 512
FAVOURITE = 255  # what a plain greedy answer to some of the prompts holds
DRAFTERS = ("same", "sibling", "random", "ngram")
FIELDS = {
    "frequency +2": SamplingParams(seed=7, temperature=0.0, frequency_penalty=2.0),
    "frequency -2": SamplingParams(seed=7, temperature=0.7, frequency_penalty=-2.0),
    "repetition and presence": SamplingParams(
        seed=7, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5
    ),
    "bias": SamplingParams(seed=7, temperature=1.0, logit_bias=((7, 4.0), (8, 3.5), (9, -100.0))),
    "allowed": SamplingParams(
        seed=7, temperature=1.0, allowed_token_ids=tuple(range(50, 90)), frequency_penalty=0.5
    ),
    "min_p": SamplingParams(seed=7, temperature=1.0, min_p=0.1),
}


@pytest.fixture(scope="module")
def lab(checkpoints: dict[str, Path]) -> Iterator[Lab]:
    """One lab for the module, computing with one thread: the models are tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Lab({name: load_decoder(path, dtype="float32") for name, path in checkpoints.items()})
    torch.set_num_threads(num_threads)


def limits() -> EngineLimits:
    return make_limits(vocab_size=VOCAB_SIZE, max_num_seqs=8, max_num_batched_tokens=48)


def requests(
    sampling: SamplingParams, *, max_tokens: int = 24, min_tokens: int = 0
) -> list[Request]:
    """Prompts of one token to several chunks."""
    rng = random.Random(2)
    prompts = [rng.choices(range(3, VOCAB_SIZE), k=size) for size in (1, 7, 30, 100)]
    return [
        replace(
            make_request(
                prompt,
                request_id=str(index),
                sampling=sampling,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
            ),
            top_logprobs=5,
        )
        for index, prompt in enumerate(prompts)
    ]


def top_of(recorder: Recorder) -> list[TopLogprobs]:
    return [top for delta in recorder.deltas for top in delta.top_logprobs]


async def checked(
    lab: Lab, asked: Sequence[Request], drafter: str, *, k: int = 5
) -> list[Recorder]:
    """The answers with a drafter, which are those without to the last bit."""
    recorders = await lab.recorders(asked, drafter, k=k, limits=limits())
    await lab.check_same(recorders, limits())
    for recorder, plain in zip(
        recorders, await lab.recorders(asked, "off", k=0, limits=limits()), strict=True
    ):
        assert top_of(recorder) == top_of(plain)
    return recorders


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", FIELDS)
async def test_x40_x41_every_field_is_the_same_with_drafts(
    lab: Lab, name: str, drafter: str
) -> None:
    """Penalties, biases, allowed ids and min-p: Same for every kind of drafter."""
    recorders = await checked(lab, requests(FIELDS[name]), drafter)
    deltas = [delta for recorder in recorders for delta in recorder.deltas]
    if drafter == "same":  # it draws as the target does, penalties and all
        assert sum(delta.num_accepted for delta in deltas) > 0
        assert all(d.num_accepted == d.num_drafted for d in deltas if d.finish_reason is None)


@pytest.mark.parametrize("drafter", ["same", "random"])
async def test_x40_min_tokens_hold_eos_back(lab: Lab, drafter: str) -> None:
    """EOS biased up by 100 and min_tokens 20: 20 tokens, then EOS as soon as it may come."""
    eager = SamplingParams(seed=7, logit_bias=((EOS_TOKEN_ID, 100.0),))
    for recorder in await checked(lab, requests(eager, max_tokens=40, min_tokens=20), drafter):
        answer = recorder.answer()
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids.index(EOS_TOKEN_ID) == 20 == answer.num_tokens - 1


async def test_x41_what_is_banned_never_appears(lab: Lab) -> None:
    """Biased by -100 or banned, neither an id nor a pair comes in 200 tokens; allowed ids only."""
    rng = random.Random(3)
    prompt = rng.choices(range(3, VOCAB_SIZE), k=9)
    some = tuple(range(20, 26))
    sampling = SamplingParams(
        seed=7,
        temperature=1.0,
        allowed_token_ids=some,
        logit_bias=((20, -100.0), (21, 2.0)),
        banned_token_ids=(22,),
        banned_sequences=((21, 21), (23, 24)),
    )
    request = replace(
        make_request(prompt, sampling=sampling, max_tokens=200, ignore_eos=True), top_logprobs=5
    )
    for drafter in ("same", "ngram"):
        [recorder] = await checked(lab, [request], drafter)
        token_ids = recorder.answer().token_ids
        assert len(token_ids) == 200
        assert set(token_ids) == {21, 23, 24, 25}
        pairs = set(pairwise(token_ids))
        assert not pairs & {(21, 21), (23, 24)}
        assert len(pairs) > 10  # of the 14 others


async def test_x41_min_p_keeps_what_is_a_tenth_as_probable_as_the_best(lab: Lab) -> None:
    """At temperature 1 every emitted token is, by the target's own logprobs."""
    for recorder in await checked(lab, requests(FIELDS["min_p"], max_tokens=60), "sibling"):
        for logprob, top in zip(recorder.answer().logprobs, top_of(recorder), strict=True):
            assert logprob >= top[0][1] + math.log(0.1) - 1e-5


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_x42_logprobs_are_the_targets_own_in_one_order(lab: Lab, drafter: str) -> None:
    """Five at T = 0: the emitted token first, falling, never zero, Same with drafts."""
    greedy = SamplingParams(seed=7, temperature=0.0)
    for recorder in await checked(lab, requests(greedy), drafter):
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
    for recorder in await checked(lab, requests(sampling), "sibling"):
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
    decoder = lab.decoders["target"]
    cache = KVCache.of(decoder, num_blocks=1, block_size=256)
    text = list(prompt)
    for position in range(len(prompt) + num_tokens - 1):
        row = torch.tensor(text[position : position + 1])
        hidden = decoder.forward(row, [Segment((0,), position, 1)], cache)
        if position >= len(prompt) - 1:
            logits = decoder.logits(hidden)[0].tolist()
            values = reference_logits(logits, spec, position + 1, text)
            text.append(values.index(max(values)))
            if text[-1] == EOS_TOKEN_ID:
                break
    return tuple(text[len(prompt) :])
