"""X05 through engines: under either rule answers are distributed as the target alone.

All distributions of a target of 16 tokens are written down, and 3,000 seeds counted against them.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from cluster.config import SkipDrafterConfig
from cluster.messages import Rule, SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.request import SamplingParams
from cluster.sampling.draw import distribution
from tests.checkpoints import make_checkpoint
from tests.conformance.chains import chi_square
from tests.conformance.head_lab import HeadLab
from tests.conformance.lab import Wrap
from tests.conformance.wrapped import Lying
from tests.harness import Recorder, make_limits, make_request
from tests.heads import make_eagle

pytestmark = pytest.mark.statistics

VOCAB = 16
NUM_REQUESTS = 3000
PROMPT = (*range(VOCAB), 5, 6, 7)  # every token has been there: n-grams draft
PLAIN = SamplingParams(seed=0, temperature=0.5)
PENALISED = SamplingParams(
    seed=0, temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> HeadLab:
    """Two unlike models of a vocabulary that can be enumerated, and a random head of the first."""
    del one_thread
    folder = tmp_path_factory.mktemp("small")
    for name, seed in (("target", 1), ("random", 2)):
        make_checkpoint(folder / name, vocab_size=VOCAB, hidden_size=32, seed=seed, num_layers=1)
    return HeadLab(
        {name: load_decoder(folder / name, dtype="float32") for name in ("target", "random")},
        skipped=SkipDrafterConfig(skip_attention=(0,)),
        heads={"eagle": make_eagle(folder / "eagle", folder / "target")},
    )


async def answers(
    lab: HeadLab, drafter: str, rule: Rule, sampling: SamplingParams, *, wrap: Wrap | None = None
) -> list[Recorder]:
    """Four tokens for each of many seeds, two drafts at a step."""
    limits = make_limits(
        vocab_size=VOCAB, max_num_seqs=64, max_num_batched_tokens=512, max_num_waiting=NUM_REQUESTS
    )
    asked = [
        make_request(
            PROMPT,
            request_id=str(seed),
            sampling=replace(sampling, seed=seed),
            max_tokens=4,
            ignore_eos=True,
        )
        for seed in range(NUM_REQUESTS)
    ]
    recorders = await lab.recorders(asked, drafter, k=2, limits=limits, rule=rule, wrap=wrap)
    num_drafted = sum(recorder.num_drafted for recorder in recorders)
    assert num_drafted > NUM_REQUESTS // 4
    assert 0 < sum(recorder.num_accepted for recorder in recorders) < num_drafted
    return recorders


def p_value(lab: HeadLab, recorders: Sequence[Recorder], sampling: SamplingParams) -> float:
    """Of the second and third token together, against the target's own law."""
    counts = np.zeros((VOCAB, VOCAB))
    for recorder in recorders:
        counts[recorder.answer().token_ids[1:3]] += 1
    return chi_square(counts.ravel(), expected(lab.decoders["target"], sampling).ravel())


@torch.inference_mode()
def expected(decoder: Decoder, sampling: SamplingParams) -> np.ndarray:
    """The target's own law of the second and third token, from all its distributions."""
    spec = SamplingSpec(
        seed=0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        num_prompt_tokens=len(PROMPT),
    )
    law = np.zeros((VOCAB, VOCAB))
    first = after(decoder, (), spec)
    seconds = [after(decoder, (token,), spec) for token in range(VOCAB)]
    for one, two in product(range(VOCAB), repeat=2):
        law[two] += first[one] * seconds[one][two] * after(decoder, (one, two), spec)
    return law


def after(decoder: Decoder, tokens: tuple[int, ...], spec: SamplingSpec) -> np.ndarray:
    text = (*PROMPT, *tokens)
    cache = KVCache.of(decoder, num_blocks=1, block_size=64)
    hidden = decoder.forward(torch.tensor(text), [Segment((0,), 0, len(text))], cache)
    logits = decoder.logits(hidden[-1:])
    return distribution(logits, [spec], [len(text)], histories=[text])[0].numpy()


@pytest.mark.parametrize(
    ("drafter", "rule", "sampling"),
    [
        ("random", Rule.RATIO, PENALISED),
        ("random", Rule.COUPLED, PENALISED),
        ("ngram", Rule.RATIO, PENALISED),
        ("choice", Rule.RATIO, PENALISED),
        ("remote random", Rule.RATIO, PLAIN),
        ("eagle", Rule.RATIO, PLAIN),
        ("skip", Rule.RATIO, PLAIN),
    ],
)
async def test_x05_an_engines_answers_are_distributed_as_the_target_alone(
    lab: HeadLab, drafter: str, rule: Rule, sampling: SamplingParams
) -> None:
    """From drafter to target, penalties in between: two tokens jointly follow the target."""
    recorders = await answers(lab, drafter, rule, sampling)
    assert p_value(lab, recorders, sampling) > 0.001


@pytest.mark.parametrize("drafter", ["random", "eagle"])
async def test_x05_an_engine_whose_drafter_ships_something_else_is_caught(
    lab: HeadLab, drafter: str
) -> None:
    """The same check fails when distributions are not those that were drawn from."""
    lying = await answers(lab, drafter, Rule.RATIO, PLAIN, wrap=Lying)
    assert p_value(lab, lying, PLAIN) < 1e-9
