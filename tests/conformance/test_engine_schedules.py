"""The main proof that the seed decides: random schedules on a real transformer, compared in bits.

Whatever the arrivals, budgets, memory, layout, cache, drafts and priorities, each request gets the
tokens, logprobs, top logprobs and prompt logprobs of a lone run in a fresh engine.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from cluster.drafters.ngram import NgramDrafter
from cluster.engine.limits import EngineLimits
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft, StepInput, StepOutput
from cluster.models.load import load_decoder
from cluster.request import Request, SamplingParams
from cluster.worker import ThreadTarget
from tests.conformance.lab import EOS_TOKEN_ID, Lab
from tests.harness import (
    GREEDY,
    Recorder,
    make_engine,
    make_limits,
    make_request,
    running,
    series,
)

VOCAB_SIZE = 512
CONTEXT = 192
SAMPLED = SamplingParams(seed=7, temperature=0.9, top_p=0.95)
STEM = tuple((17 * i * i + 5 * i) % 500 + 3 for i in range(130))

Bits = tuple[object, ...]


def pool() -> list[Request]:
    """Twelve requests, most of which begin alike: more or less of one stem, then their own end."""
    asked = []
    for index, num_shared in enumerate((0, 1, 17, 63, 64, 65, 65, 90, 100, 128, 129, 130)):
        own = tuple((7 * i + 31 * index) % 500 + 3 for i in range(1 + 5 * index % 23))
        request = make_request(
            (*STEM[:num_shared], *own),
            sampling=GREEDY if index % 3 == 0 else replace(SAMPLED, seed=index),
            max_tokens=4 + 3 * index % 26,
            ignore_eos=True,
        )
        asked.append(replace(request, top_logprobs=index % 3, prompt_logprobs=index % 4 == 1))
    return asked


def bits(recorder: Recorder) -> Bits:
    """All that must be the same, floats by their bits."""
    answer = recorder.answer()
    return (
        answer.token_ids,
        [logprob.hex() for logprob in answer.logprobs],
        [logprob.hex() for logprob in recorder.prompt_logprobs],
        [
            (token_id, logprob.hex())
            for delta in recorder.deltas
            for top in delta.top_logprobs
            for token_id, logprob in top
        ],
        answer.finish_reason,
    )


@dataclass
class Proof:
    """The lab, what each request of the pool gets alone, and what the schedules brought about."""

    lab: Lab
    asked: list[Request]
    expected: list[Bits]
    seen: Counter[str]


@pytest.fixture(scope="module")
def proof(checkpoints: dict[str, Path]) -> Iterator[Proof]:
    """Lone runs first, with one thread: the model is tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lab = Lab({"target": load_decoder(checkpoints["target"], dtype="float32")})
    limits = limits_of(CONTEXT, max_num_batched_tokens=CONTEXT, prefix_cache=False)
    expected = []
    for request in pool():
        [recorder] = asyncio.run(lab.recorders([request], "off", k=0, limits=limits))
        expected.append(bits(recorder))
    yield Proof(lab, pool(), expected, Counter())
    torch.set_num_threads(num_threads)


def limits_of(block_size: int, **changes: float) -> EngineLimits:
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": CONTEXT, "block_size": block_size}
    return make_limits(**(sizes | changes))


class HalfRight:
    """Knows the answers, and proposes them with every third token changed."""

    name = "half right"
    context_limit = None

    def __init__(self, proof: Proof) -> None:
        self._texts = [
            (*request.prompt_token_ids, *tokens)  # type: ignore[misc]
            for request, (tokens, *_) in zip(proof.asked, proof.expected, strict=True)
        ]

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """As much as is wanted, if there is as much."""
        return {query.seq_id: Draft(self._after(query)) for query in queries}

    def _after(self, query: DraftQuery) -> tuple[int, ...]:
        length = len(query.token_ids)
        for text in self._texts:
            if text[:length] == tuple(query.token_ids):
                proposed = text[length : length + query.num_wanted]
                return tuple(t if (length + i) % 3 else 5 for i, t in enumerate(proposed))
        return ()

    def release(self, seq_ids: Iterable[int]) -> None:
        """Nothing is held."""


class Watched:
    """A target that calls `during` with each step before it computes it."""

    def __init__(self, target: ThreadTarget) -> None:
        self._target = target
        self.during: Callable[[StepInput], None] = lambda _: None

    async def step(self, step: StepInput) -> StepOutput:
        """As the other's."""
        self.during(step)
        return await self._target.step(step)


@dataclass(frozen=True)
class Arrival:
    """A request of the pool, and the step in which it comes: sooner if nothing else is left."""

    index: int
    step: int
    priority: int


ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 11), st.integers(0, 40), st.integers(-1, 1)),
    min_size=2,
    max_size=12,
)


@st.composite
def limits_of_schedules(draw: st.DrawFn) -> EngineLimits:
    """Any layout, chunk budget and memory: down to one context, so that sequences are put back."""
    block_size = draw(st.sampled_from([16, 24, 64, 100, 128, CONTEXT]))
    return limits_of(
        block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([9, 33, 64, 200])),
        max_prompt_rows_beside_decodes=draw(st.sampled_from([5, 16, 64])),
        num_blocks=-(-CONTEXT // block_size) + draw(st.integers(0, 6)),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
    )


@settings(max_examples=30)
@given(
    arrivals=ARRIVALS,
    limits=limits_of_schedules(),
    k=st.sampled_from([0, 1, 4, 11]),
    drafter_name=st.sampled_from(["ngram", "half right"]),
)
def test_every_schedule_gives_the_bits_of_a_lone_run(
    proof: Proof, arrivals: list[Arrival], limits: EngineLimits, k: int, drafter_name: str
) -> None:
    """The seed decides: nothing else about a step may be seen in any logprob."""
    drafter = NgramDrafter() if drafter_name == "ngram" else HalfRight(proof)
    registry = CollectorRegistry()
    recorders = asyncio.run(_play(proof, arrivals, limits, drafter, k, registry))
    for arrival, recorder in zip(arrivals, recorders, strict=True):
        assert bits(recorder) == proof.expected[arrival.index]
    counted = series(registry)
    proof.seen["schedules"] += 1
    proof.seen["hits"] += counted["drafthouse_prefix_cache_hit_tokens_total"] > 0
    proof.seen["preemptions"] += counted["drafthouse_preemptions_total"] > 0
    proof.seen["accepted"] += counted["drafthouse_spec_decode_num_accepted_tokens_total"] > 0


def test_the_schedules_were_hard_enough(proof: Proof) -> None:
    """What could have gone wrong did happen, in many of them."""
    if not proof.seen["schedules"]:
        pytest.skip("the schedules were not played")
    for event in ("hits", "preemptions", "accepted"):
        assert proof.seen[event] > proof.seen["schedules"] // 8, event


async def _play(
    proof: Proof,
    arrivals: list[Arrival],
    limits: EngineLimits,
    drafter: Drafter,
    k: int,
    registry: CollectorRegistry,
) -> list[Recorder]:
    """Each request's deltas; nothing may be left in the engine."""
    with ExitStack() as stack:
        target = Watched(proof.lab.target(limits, stack))
        engine = make_engine(
            target,
            drafter,
            limits=limits,
            num_speculative_tokens=k,
            eos_token_ids=[EOS_TOKEN_ID],
            registry=registry,
        )
        recorders = [
            Recorder(replace(proof.asked[a.index], request_id=str(n), priority=a.priority))
            for n, a in enumerate(arrivals)
        ]
        unsent = sorted(zip(arrivals, recorders, strict=True), key=lambda pair: pair[0].step)
        sent: list[Recorder] = []

        def submit_until(step: StepInput) -> None:
            while unsent and unsent[0][0].step <= step.step_id:
                sent.append(unsent.pop(0)[1])
                engine.submit(sent[-1].request, sent[-1])

        target.during = submit_until
        async with running(engine):
            while unsent:
                submit_until(StepInput(unsent[0][0].step, ()))
                for recorder in sent:
                    await recorder.finished.wait()
            for recorder in sent:
                await recorder.finished.wait()
            load = engine.load()
        assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    return recorders
