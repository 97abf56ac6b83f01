"""The ratio rule in an engine: what drafters bring and what targets verify belong together.

Greedy answers are Same under it. What a seed draws depends on the drafts, so sampled answers are
compared with the rule itself; what they are distributed as is for `test_engine_laws`.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cluster.interfaces import Drafter
from cluster.messages import Draft, Rule, SamplingSpec
from cluster.request import FinishReason, Request, SamplingParams
from cluster.sampling.draw import distribution, sample
from cluster.sampling.logprobs import token_log_probs
from cluster.sampling.ratio import verify_ratio
from tests.conformance.inputs import BANNED, EAGER_TO_END, K, limits_of, scored_requests
from tests.conformance.lab import EOS_TOKEN_ID, VOCAB_SIZE, Lab
from tests.conformance.rows import OneRow
from tests.conformance.wrapped import Noting
from tests.harness import GREEDY, make_request

SAMPLED = SamplingParams(seed=7, temperature=0.9, top_k=40)
PENALISED = replace(
    SAMPLED,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=-0.3,
    logit_bias=((9, 3.0),),
    banned_token_ids=(11, 12),
    banned_sequences=((9, 9), (9, 10)),
)
LIMITS = limits_of()

every_k = pytest.mark.parametrize("k", K)


def some_requests(sampling: SamplingParams, *, min_tokens: int = 0) -> list[Request]:
    rng = random.Random(4)
    return [
        make_request(
            rng.choices(range(3, VOCAB_SIZE), k=rng.randint(2, 40)),
            request_id=str(index),
            sampling=replace(sampling, seed=index),
            max_tokens=12,
            min_tokens=min_tokens,
        )
        for index in range(12)
    ]


@every_k
@pytest.mark.parametrize(
    "drafter", ["same", "sibling", "random", "ngram", "silent", "dying", "remote sibling"]
)
async def test_x01_greedy_answers_are_the_same_under_the_ratio_rule(
    lab: Lab, drafter: str, k: int
) -> None:
    """T = 0: tokens, logprob bits, reasons and usage are those of speculation off."""
    recorders = await lab.recorders(
        some_requests(GREEDY), drafter, k=k, limits=LIMITS, rule=Rule.RATIO
    )
    await lab.check_same(recorders, LIMITS)
    assert (sum(recorder.num_drafted for recorder in recorders) > 0) == (drafter != "silent")


async def test_x04_every_token_is_the_rules_own(lab: Lab) -> None:
    """K = 1, blind guesses, T = 1, 200 tokens: the rule on rows computed alone, to the last bit.

    Given the drafts as they were shipped, a walk without an engine makes the same steps.
    """
    sampling = SamplingParams(seed=7, temperature=1.0)
    request = make_request([5, 6, 7], sampling=sampling, max_tokens=200, ignore_eos=True)
    noting: list[Noting] = []

    def noted(drafter: Drafter) -> Drafter:
        noting.append(Noting(drafter))
        return noting[0]

    [recorder] = await lab.recorders(
        [request], "random", k=1, limits=LIMITS, rule=Rule.RATIO, wrap=noted
    )
    steps = walked(lab, request, noting[0].drafts)
    assert [(list(each.token_ids), list(each.logprobs)) for each in recorder.deltas] == steps
    assert recorder.answer().num_tokens == 200
    assert recorder.num_drafted > 100
    assert 0 < recorder.num_accepted < recorder.num_drafted


def walked(
    lab: Lab, request: Request, drafts: dict[int, Draft]
) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of each step, with the drafts by the length of the text they follow."""
    rows = OneRow(lab.decoders["target"])
    seed = request.sampling.seed
    spec = SamplingSpec(seed=seed, temperature=request.sampling.temperature)
    text = list(request.prompt_token_ids)
    for position, token_id in enumerate(text[:-1]):
        rows.logits(token_id, position)
    steps = []
    while len(text) < len(request.prompt_token_ids) + 200:
        draft = drafts.get(len(text), Draft())
        positions = range(len(text), len(text) + len(draft.token_ids) + 1)
        computed = [
            rows.logits(token_id, position - 1)
            for token_id, position in zip((text[-1], *draft.token_ids), positions, strict=True)
        ]
        if draft.token_ids:
            target_probs = torch.cat([distribution(logits, [spec], [0]) for logits in computed])
            token_ids = verify_ratio(
                target_probs, draft.token_ids, draft.distributions, seed=seed, positions=positions
            )
        else:
            token_ids = sample(computed[0], [spec], positions)
        logprobs = [
            logprob
            for logits, token_id in zip(computed, token_ids, strict=False)
            for logprob in token_log_probs(logits, [token_id])
        ]
        steps.append((token_ids, logprobs))
        text += token_ids
    return steps


@every_k
@pytest.mark.parametrize("drafter", ["same", "sibling", "random", "ngram"])
async def test_x14_a_ratio_answer_has_as_many_tokens_as_asked(
    lab: Lab, drafter: str, k: int
) -> None:
    """However many drafts are kept, an answer ends at its limit or its stop, and is a legal one."""
    asked = some_requests(SAMPLED)
    recorders = await lab.recorders(asked, drafter, k=k, limits=LIMITS, rule=Rule.RATIO)
    for recorder in recorders:
        answer = recorder.answer()
        assert answer.num_tokens == 12 or answer.finish_reason == "stop"
        assert len(answer.logprobs) == answer.num_tokens
    again = await lab.recorders(asked, drafter, k=k, limits=LIMITS, rule=Rule.RATIO)
    assert [each.answer() for each in again] == [each.answer() for each in recorders]


@every_k
@pytest.mark.parametrize("drafter", ["same", "random"])
async def test_x14_max_tokens_is_exact(lab: Lab, drafter: str, k: int) -> None:
    """max_tokens of 1, 2, K and K + 1: that many tokens, sampled."""
    asked = [
        make_request([5, 6], request_id=str(n), sampling=SAMPLED, max_tokens=n, ignore_eos=True)
        for n in {1, 2, k, k + 1}
    ]
    for recorder in await lab.recorders(asked, drafter, k=k, limits=LIMITS, rule=Rule.RATIO):
        answer = recorder.answer()
        assert answer.num_tokens == recorder.request.stopping.max_tokens
        assert answer.finish_reason is FinishReason.LENGTH


async def test_x20_the_seed_repeats_and_another_seed_does_not(lab: Lab) -> None:
    """The same drafts, seed 7 twice and in a new engine: equal; seed 8: different."""
    asked = [
        make_request([5, 6], request_id=str(i), sampling=replace(SAMPLED, seed=seed))
        for i, seed in enumerate((7, 7, 8))
    ]
    first = await lab.recorders(asked, "same", k=5, limits=LIMITS, rule=Rule.RATIO)
    again = await lab.recorders(asked[:1], "same", k=5, limits=LIMITS, rule=Rule.RATIO)
    seven, same, eight, restarted = (recorder.answer() for recorder in [*first, *again])
    assert seven == same == restarted
    assert seven.token_ids != eight.token_ids
    assert all(recorder.num_accepted > 0 for recorder in first)


@pytest.mark.parametrize("drafter", ["same", "random"])
async def test_x40_min_tokens_hold_eos_back(lab: Lab, drafter: str) -> None:
    """EOS biased up by 100 and min_tokens 20: 20 tokens, then EOS as soon as it may come."""
    asked = scored_requests(EAGER_TO_END, max_tokens=40, min_tokens=20)
    for recorder in await lab.recorders(asked, drafter, k=5, limits=LIMITS, rule=Rule.RATIO):
        answer = recorder.answer()
        assert recorder.num_drafted > 0
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids.index(EOS_TOKEN_ID) == 20 == answer.num_tokens - 1


@pytest.mark.parametrize("drafter", ["same", "random", "ngram"])
async def test_x41_what_is_banned_never_appears(lab: Lab, drafter: str) -> None:
    """In 200 tokens, neither an id nor a pair, whether it was biased, banned or not allowed."""
    request = make_request([5, 6, 7], sampling=BANNED, max_tokens=200, ignore_eos=True)
    [recorder] = await lab.recorders([request], drafter, k=5, limits=LIMITS, rule=Rule.RATIO)
    token_ids = recorder.answer().token_ids
    assert len(token_ids) == 200
    assert set(token_ids) == {21, 23, 24, 25}
    assert not set(pairwise(token_ids)) & {(21, 21), (23, 24)}
    assert recorder.num_accepted > 0


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["plain", "penalised"])
async def test_the_targets_own_weights_are_always_right(
    lab: Lab, sampling: SamplingParams, rule: Rule
) -> None:
    """Both sides process alike, penalties and banned words too: equal models keep every draft.

    Under the ratio rule as far as the cut-off distribution that is shipped is the whole of it.
    """
    recorders = await lab.recorders(
        some_requests(sampling, min_tokens=6), "same", k=4, limits=LIMITS, rule=rule
    )
    deltas = [delta for recorder in recorders for delta in recorder.deltas]
    assert sum(delta.num_accepted for delta in deltas) > 60
    for delta in deltas:
        if delta.finish_reason is None:
            assert delta.num_accepted == delta.num_drafted
