"""The ratio rule in an engine: what drafters bring and what targets verify belong together."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft, DraftDistribution, Rule, SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.request import SamplingParams
from cluster.sampling.draw import distribution
from tests.checkpoints import make_checkpoint
from tests.conformance.chains import chi_square
from tests.conformance.lab import Lab
from tests.harness import GREEDY, ask, make_engine, make_limits, make_request, running

pytestmark = pytest.mark.statistics

VOCAB = 16
NUM_REQUESTS = 3000
PROMPT = (*range(VOCAB), 5, 6, 7)  # every token has been there: n-grams draft
SAMPLED = SamplingParams(seed=7, temperature=0.9, top_k=40)
LIMITS = make_limits(vocab_size=512, max_num_seqs=8, max_num_batched_tokens=256)
PENALISED = replace(
    SAMPLED,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=-0.3,
    logit_bias=((9, 3.0),),
    banned_token_ids=(11, 12),
    banned_sequences=((9, 9), (9, 10)),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only wait for each other in models this small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def lab(checkpoints: dict[str, Path]) -> Lab:
    return Lab({name: load_decoder(path, dtype="float32") for name, path in checkpoints.items()})


@pytest.fixture(scope="module")
def small_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Two unlike models of a vocabulary that can be enumerated."""
    folder = tmp_path_factory.mktemp("small")
    return Lab(
        {
            name: load_decoder(
                make_checkpoint(
                    folder / name, vocab_size=VOCAB, hidden_size=32, seed=seed, num_layers=1
                ),
                dtype="float32",
            )
            for name, seed in (("target", 1), ("random", 2))
        }
    )


def some_requests(sampling: SamplingParams, *, min_tokens: int = 0) -> list:
    rng = random.Random(4)
    return [
        make_request(
            rng.choices(range(3, 512), k=rng.randint(2, 40)),
            request_id=str(index),
            sampling=replace(sampling, seed=index),
            max_tokens=12,
            min_tokens=min_tokens,
        )
        for index in range(12)
    ]


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("drafter", ["same", "sibling", "random", "ngram", "silent", "dying"])
async def test_x01_greedy_answers_are_the_same_under_the_ratio_rule(
    lab: Lab, drafter: str, k: int
) -> None:
    """T = 0: tokens, logprob bits, reasons and usage are those of speculation off."""
    recorders = await lab.recorders(
        some_requests(GREEDY), drafter, k=k, limits=LIMITS, rule=Rule.RATIO
    )
    await lab.check_same(recorders, LIMITS)


@pytest.mark.parametrize("k", [1, 2, 5, 16])
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


class Lying:
    """A draft model that ships other distributions than it drew from."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name
        self.context_limit = drafter.context_limit

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """The drafts, with distributions turned around."""
        drafts = await self._drafter.propose(queries)
        return {
            seq_id: Draft(draft.token_ids, tuple(turned(each) for each in draft.distributions))
            for seq_id, draft in drafts.items()
        }

    def release(self, seq_ids: Iterable[int]) -> None:
        """As the other."""
        self._drafter.release(seq_ids)


def turned(drawn: DraftDistribution) -> DraftDistribution:
    return DraftDistribution(drawn.token_ids, drawn.probabilities[::-1])


async def second_and_third(
    lab: Lab, drafter: str, rule: Rule, sampling: SamplingParams, *, lying: bool = False
) -> np.ndarray:
    """How often each pair of tokens came second and third, over many seeds: `[VOCAB, VOCAB]`."""
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
    with ExitStack() as stack:
        made = lab.drafter(drafter, limits, stack, rule=rule)
        engine = make_engine(
            lab.target(limits, stack),
            Lying(made) if lying else made,
            limits=limits,
            num_speculative_tokens=2,
            rule=rule,
        )
        async with running(engine):
            recorders = await ask(engine, asked)
    assert sum(recorder.num_drafted for recorder in recorders) > NUM_REQUESTS // 4
    counts = np.zeros((VOCAB, VOCAB))
    for recorder in recorders:
        counts[recorder.answer().token_ids[1:3]] += 1
    return counts


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
    ("drafter", "rule"),
    [
        ("random", Rule.RATIO),
        ("random", Rule.COUPLED),
        ("ngram", Rule.RATIO),
        ("choice", Rule.RATIO),
    ],
)
async def test_x05_an_engines_answers_are_distributed_as_the_target_alone(
    small_lab: Lab, drafter: str, rule: Rule
) -> None:
    """From drafter to target, penalties in between: two tokens jointly follow the target."""
    sampling = SamplingParams(
        seed=0, temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4
    )
    counts = await second_and_third(small_lab, drafter, rule, sampling)
    law = expected(small_lab.decoders["target"], sampling)
    assert chi_square(counts.ravel(), law.ravel()) > 0.001


async def test_x05_an_engine_whose_drafter_ships_something_else_is_caught(small_lab: Lab) -> None:
    """The same check fails when distributions are not those that were drawn from."""
    sampling = SamplingParams(seed=0, temperature=0.5)
    law = expected(small_lab.decoders["target"], sampling).ravel()
    true = await second_and_third(small_lab, "random", Rule.RATIO, sampling)
    assert chi_square(true.ravel(), law) > 0.001
    lying = await second_and_third(small_lab, "random", Rule.RATIO, sampling, lying=True)
    assert chi_square(lying.ravel(), law) < 1e-9
