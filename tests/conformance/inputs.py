"""What engines over the tiny models are asked, and the limits they are asked under."""

import random
from collections.abc import Iterable
from dataclasses import replace

from cluster.engine.limits import EngineLimits
from cluster.request import Request, SamplingParams
from tests.conformance.lab import EOS_TOKEN_ID, VOCAB_SIZE
from tests.harness import GREEDY, Recorder, make_limits, make_request

K = (1, 2, 5, 16)
SAMPLED = SamplingParams(seed=7, temperature=0.8)
EAGER_TO_END = SamplingParams(seed=7, logit_bias=((EOS_TOKEN_ID, 100.0),))
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
BANNED = SamplingParams(  # all but 21, 23, 24 and 25, and two of their 16 pairs
    seed=7,
    temperature=1.0,
    allowed_token_ids=tuple(range(20, 26)),
    logit_bias=((20, -100.0), (21, 2.0)),
    banned_token_ids=(22,),
    banned_sequences=((21, 21), (23, 24)),
)


def limits_of(**changes: float) -> EngineLimits:
    """For a context of 256 and 8 sequences unless `changes` say else."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return make_limits(**(sizes | changes))


def wide_limits(max_num_seqs: int = 16) -> EngineLimits:
    """With room for 2,100 tokens."""
    return limits_of(max_model_len=2100, max_num_seqs=max_num_seqs, max_num_batched_tokens=512)


def prompts() -> list[list[int]]:
    """50 prompts: one a word repeated 48 times, one a single token, one of 2,000 tokens."""
    rng = random.Random(1)
    others = [rng.choices(range(3, VOCAB_SIZE), k=rng.randint(2, 60)) for _ in range(47)]
    return [[5, 6, 7] * 48, [3], rng.choices(range(3, VOCAB_SIZE), k=2000), *others]


def fifty_requests(sampling: SamplingParams = GREEDY, max_tokens: int = 8) -> list[Request]:
    """One for each prompt."""
    return [
        make_request(prompt, request_id=str(index), sampling=sampling, max_tokens=max_tokens)
        for index, prompt in enumerate(prompts())
    ]


def scored_requests(
    sampling: SamplingParams,
    *,
    name: str = "",
    max_tokens: int = 24,
    min_tokens: int = 0,
) -> list[Request]:
    """Prompts of one token to several chunks, with five top logprobs at every token."""
    rng = random.Random(2)
    return [
        replace(
            make_request(
                rng.choices(range(3, VOCAB_SIZE), k=size),
                request_id=f"{name}{size}",
                sampling=sampling,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
            ),
            top_logprobs=5,
        )
        for size in (1, 7, 30, 100)
    ]


def assert_always_right(recorders: Iterable[Recorder]) -> None:
    """With the target's own weights and noise every draft is accepted, but past a stop."""
    deltas = [delta for recorder in recorders for delta in recorder.deltas]
    assert sum(delta.num_accepted for delta in deltas) > 0
    for delta in deltas:
        if delta.finish_reason is None:
            assert delta.num_accepted == delta.num_drafted
