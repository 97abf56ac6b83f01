"""The main proof that the seed decides: random schedules on a real transformer, compared in bits.

Whatever the arrivals, budgets, memory, layout, cache, drafts, priorities and aborts, each request
gets the tokens, logprobs, top logprobs and prompt logprobs of a lone run in a fresh engine, or if
it is aborted the first of them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from cluster.engine.limits import EngineLimits
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, StepInput, StepOutput
from cluster.models.load import load_decoder
from cluster.request import FinishReason, Request, SamplingParams, answer_seed
from cluster.worker import ThreadTarget
from tests.conformance.inputs import EAGER_TO_END
from tests.conformance.lab import EOS_TOKEN_ID, VOCAB_SIZE, Lab, Place
from tests.grammar.sources import regex
from tests.harness import (
    GREEDY,
    Recorder,
    make_engine,
    make_limits,
    make_request,
    running,
    series,
)

CONTEXT = 192
SAMPLED = SamplingParams(seed=7, temperature=0.9, top_p=0.95)
PENALISED = replace(
    EAGER_TO_END,
    temperature=0.8,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=-0.2,
    logit_bias=(*EAGER_TO_END.logit_bias, (9, 2.0)),
)
STEM = tuple((17 * i * i + 5 * i) % 500 + 3 for i in range(130))
DTYPES = ("float32", "int8")
COUNTERS = {
    "hits": "drafthouse_prefix_cache_hit_tokens_total",
    "preemptions": "drafthouse_preemptions_total",
    "accepted": "drafthouse_spec_decode_num_accepted_tokens_total",
}
DRAFTERS = ("ngram", "half right", "sibling", "skip", "remote sibling")


def pool() -> list[Request]:
    """Twelve requests, most of which begin alike, and some of every other kind."""
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
    return [*asked, *others()]


def others() -> list[Request]:
    """In a grammar, two answers to one prompt, with penalties and an end held back, unscored."""
    in_grammar = make_request(STEM[:40], sampling=SAMPLED, max_tokens=30)
    choices = [
        make_request(
            STEM[:70],
            sampling=replace(SAMPLED, seed=answer_seed(3, index)),
            max_tokens=25,
            ignore_eos=True,
        )
        for index in range(2)
    ]
    penalised = make_request(STEM[20:60], sampling=PENALISED, min_tokens=15, max_tokens=30)
    unscored = make_request(STEM[:90], max_tokens=24, ignore_eos=True)
    return [
        replace(in_grammar, grammar=regex("[a-c]{9,40}")),
        *choices,
        replace(penalised, top_logprobs=2),
        replace(unscored, logprobs=False),
    ]


NUM_REQUESTS = len(pool())


@dataclass(frozen=True)
class Bits:
    """All that must be the same, floats by their bits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[str, ...]
    top_logprobs: tuple[tuple[tuple[int, str], ...], ...]
    prompt_logprobs: tuple[str, ...]
    finish_reason: FinishReason | None

    def begins(self, other: "Bits") -> bool:
        """Whether this is the other, aborted."""
        num_tokens = len(self.token_ids)
        begun = Bits(
            other.token_ids[:num_tokens],
            other.logprobs[:num_tokens],
            other.top_logprobs[:num_tokens],
            other.prompt_logprobs if num_tokens else (),
            FinishReason.ABORT,
        )
        return num_tokens < len(other.token_ids) and self == begun


def bits(recorder: Recorder) -> Bits:
    answer = recorder.answer()
    return Bits(
        answer.token_ids,
        tuple(logprob.hex() for logprob in answer.logprobs),
        tuple(
            tuple((token_id, logprob.hex()) for token_id, logprob in top)
            for delta in recorder.deltas
            for top in delta.top_logprobs
        ),
        tuple(logprob.hex() for logprob in recorder.prompt_logprobs),
        answer.finish_reason,
    )


@dataclass
class Proof:
    """The lab, what each request of the pool gets alone, and what the schedules brought about."""

    lab: Lab
    asked: list[Request]
    expected: list[Bits]
    seen: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def proofs(checkpoints: dict[str, Path], one_thread: None) -> dict[str, Proof]:
    """By the target's number format; lone runs first."""
    del one_thread
    sibling, folder = load_decoder(checkpoints["sibling"], dtype="float32"), checkpoints["target"]
    limits = limits_of(CONTEXT, max_num_batched_tokens=CONTEXT, prefix_cache=False)
    proofs = {}
    for dtype in DTYPES:
        lab = Lab({"target": load_decoder(folder, dtype=dtype), "sibling": sibling}, folder)
        expected = []
        for request in pool():
            [recorder] = asyncio.run(lab.recorders([request], "off", k=0, limits=limits))
            expected.append(bits(recorder))
        proofs[dtype] = Proof(lab, pool(), expected)
    return proofs


def limits_of(block_size: int, **changes: float | None) -> EngineLimits:
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": CONTEXT, "block_size": block_size}
    return make_limits(**(sizes | changes))


class HalfRight:
    """Knows the answers, and proposes them with every third token changed."""

    name = "half right"
    context_limit = None

    def __init__(self, proof: Proof) -> None:
        self._texts = [
            (*request.prompt_token_ids, *whole.token_ids)
            for request, whole in zip(proof.asked, proof.expected, strict=True)
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
    """A request of the pool, and the step in which it comes: sooner if nothing else is left.

    With a `patience` it is aborted, in the step after so many of its deltas.
    """

    index: int
    step: int
    priority: int = 0
    patience: int | None = None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, NUM_REQUESTS - 1),
        st.integers(0, 40),
        st.integers(-1, 1),
        st.one_of(st.none(), st.none(), st.integers(0, 9)),
    ),
    min_size=2,
    max_size=12,
)


@dataclass(frozen=True)
class Setting:
    """Where the requests go to."""

    limits: EngineLimits
    k: int
    drafter: str
    dtype: str


@st.composite
def settings_of_engines(draw: st.DrawFn) -> Setting:
    """Any layout, chunk budget and memory: down to one context, so that sequences are put back."""
    block_size = draw(st.sampled_from([16, 24, 64, 100, 128, CONTEXT]))
    limits = limits_of(
        block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([9, 33, 64, 200])),
        max_prompt_rows_beside_decodes=draw(st.sampled_from([5, 16, 64, None])),
        num_blocks=-(-CONTEXT // block_size) + draw(st.integers(0, 6)),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
    )
    return Setting(
        limits,
        k=draw(st.sampled_from([4, 1, 11, 0])),
        drafter=draw(st.sampled_from(DRAFTERS)),
        dtype=draw(st.sampled_from(["float32", *DTYPES])),
    )


@settings(max_examples=30)
@given(arrivals=ARRIVALS, setting=settings_of_engines())
def test_every_schedule_gives_the_bits_of_a_lone_run(
    proofs: dict[str, Proof], arrivals: list[Arrival], setting: Setting
) -> None:
    """The seed decides: nothing else about a step may be seen in any logprob."""
    proof = proofs[setting.dtype]
    events = _check(proof, arrivals, setting)
    proof.seen.update(["schedules", *events])


def test_the_schedules_were_hard_enough(proofs: dict[str, Proof]) -> None:
    """What could have gone wrong did happen, in many of them."""
    seen = sum((proof.seen for proof in proofs.values()), Counter[str]())
    if not seen["schedules"]:
        pytest.skip("the schedules were not played")
    for event in ("hits", "preemptions", "accepted", "cut short"):
        assert seen[event] > seen["schedules"] // 8, event


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_whole_pool_at_once(proofs: dict[str, Proof], drafter: str, dtype: str) -> None:
    """Every drafter beside every kind of request, in little memory and with aborts: the same."""
    arrivals = [
        Arrival(index, step=index % 5, patience=index % 7 if index % 3 == 1 else None)
        for index in range(NUM_REQUESTS)
    ]
    limits = limits_of(16, max_num_seqs=6, num_blocks=14)
    events = _check(proofs[dtype], arrivals, Setting(limits, k=4, drafter=drafter, dtype=dtype))
    assert events == {"hits", "preemptions", "accepted", "cut short"}


def _check(proof: Proof, arrivals: list[Arrival], setting: Setting) -> set[str]:
    """Play it and compare all answers; returns what happened in it."""
    registry = CollectorRegistry()
    recorders = asyncio.run(_play(proof, arrivals, setting, registry))
    events = set()
    for arrival, recorder in zip(arrivals, recorders, strict=True):
        got, expected = bits(recorder), proof.expected[arrival.index]
        if arrival.patience is not None and got.finish_reason is FinishReason.ABORT:
            assert got.begins(expected)
            if got.token_ids:
                events.add("cut short")
        else:
            assert got == expected
    counted = series(registry)
    for event, name in COUNTERS.items():
        if counted[name] > 0:
            events.add(event)
    return events


async def _play(
    proof: Proof, arrivals: list[Arrival], setting: Setting, registry: CollectorRegistry
) -> list[Recorder]:
    """Each request's deltas; nothing may be left in the engine."""
    limits = setting.limits
    with ExitStack() as stack:
        worker = proof.lab.worker(limits)
        thread = ThreadTarget(worker)
        stack.callback(thread.close)
        place = Place(worker, thread, limits, stack)
        target = Watched(thread)
        engine = make_engine(
            target,
            HalfRight(proof)
            if setting.drafter == "half right"
            else proof.lab.drafter(setting.drafter, place),
            limits=limits,
            num_speculative_tokens=setting.k,
            eos_token_ids=[EOS_TOKEN_ID],
            registry=registry,
        )
        recorders = [
            Recorder(replace(proof.asked[a.index], request_id=str(n), priority=a.priority))
            for n, a in enumerate(arrivals)
        ]
        unsent = sorted(zip(arrivals, recorders, strict=True), key=lambda pair: pair[0].step)
        sent: list[tuple[Arrival, Recorder]] = []

        def act_until(step: StepInput) -> None:
            while unsent and unsent[0][0].step <= step.step_id:
                sent.append(unsent.pop(0))
                engine.submit(sent[-1][1].request, sent[-1][1])
            for arrival, recorder in sent:
                if arrival.patience is not None and len(recorder.deltas) >= arrival.patience:
                    engine.abort(recorder.request.request_id)

        target.during = act_until
        async with running(engine):
            while unsent:
                act_until(StepInput(unsent[0][0].step, ()))
                for _, recorder in sent:
                    await recorder.finished.wait()
            for _, recorder in sent:
                await recorder.finished.wait()
            await thread.call(lambda: None)  # after a step in which all were aborted
            load = engine.load()
        assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    return recorders
