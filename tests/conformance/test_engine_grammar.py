"""Structured output from the engine, on a tiny random llama that would write anything.

The schema forces an end whatever the model likes: enums, short strings, bounded numbers.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from cluster.config import (
    BUILTIN_MODEL,
    DrafthouseConfig,
    NgramDrafterConfig,
    NoDrafterConfig,
    SpeculationConfig,
)
from cluster.control.policy import FixedPolicy
from cluster.drafters.model import DraftModel, ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.silent import NoDrafter
from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.states import GrammarStates
from cluster.interfaces import Drafter
from cluster.local import build_engine
from cluster.messages import Rule
from cluster.metrics import EngineMetrics
from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder
from cluster.models.reference import resolve
from cluster.request import FinishReason, Request, SamplingParams
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer, load_vocabulary
from cluster.worker import TargetWorker, ThreadTarget
from tests.conformance.lab import EOS_TOKEN_ID
from tests.fakes import FakeModel, RandomDrafter
from tests.grammar.sources import PERSON, check_person, json_schema, lark, regex
from tests.harness import GREEDY, Answer, Recorder, ask, make_limits, make_request, running

VOCAB_SIZE = 512
SAMPLED = SamplingParams(seed=7, temperature=0.8)
NUM_REQUESTS = 32


@dataclass(frozen=True)
class Checkpoint:
    """The tiny target with its tokenizer."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer

    def states(self) -> GrammarStates:
        """As `cluster.local` makes them."""
        return GrammarStates(
            lambda: GrammarCompiler(
                load_vocabulary(self.folder),
                eos_token_ids=frozenset({EOS_TOKEN_ID}),
                vocab_size=VOCAB_SIZE,
            )
        )


@pytest.fixture(scope="module")
def checkpoint(checkpoints: dict[str, Path]) -> Iterator[Checkpoint]:
    """Computes with one thread: the model is tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = checkpoints["target"]
    yield Checkpoint(folder, load_decoder(folder, dtype="float32"), load_tokenizer(folder))
    torch.set_num_threads(num_threads)


def limits(**changes: float) -> EngineLimits:
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": 512, "max_num_seqs": NUM_REQUESTS}
    return make_limits(**(sizes | {"max_num_batched_tokens": 512} | changes))


def off(_: Checkpoint, __: ExitStack) -> Drafter:
    return NoDrafter()


def blind(_: Checkpoint, __: ExitStack) -> Drafter:
    """Breaks the grammar nearly always."""
    return RandomDrafter(FakeModel(VOCAB_SIZE))


def same(checkpoint: Checkpoint, stack: ExitStack) -> Drafter:
    """The target's own model, which knows of no grammar: right until the grammar says other."""
    model = DraftModel(checkpoint.decoder, num_blocks=NUM_REQUESTS, block_size=512)
    drafter = ModelDrafter(model, name="same")
    stack.callback(drafter.close)
    return drafter


def ngram(_: Checkpoint, __: ExitStack) -> Drafter:
    return NgramDrafter()


async def recorders_of(
    checkpoint: Checkpoint,
    asked: Sequence[Request],
    make_drafter: Callable[[Checkpoint, ExitStack], Drafter] = off,
    *,
    k: int = 0,
    rule: Rule = Rule.COUPLED,
    sizes: EngineLimits | None = None,
) -> list[Recorder]:
    """Every request's deltas, all submitted at once; nothing is left in the engine."""
    sizes = sizes or limits()
    with ExitStack() as stack:
        target = ThreadTarget(
            TargetWorker(
                checkpoint.decoder,
                num_blocks=sizes.num_blocks,
                block_size=sizes.block_size,
                grammars=checkpoint.states(),
            )
        )
        stack.callback(target.close)
        engine = Engine(
            target=target,
            drafter=make_drafter(checkpoint, stack),
            policy=FixedPolicy(k),
            limits=sizes,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            metrics=EngineMetrics(CollectorRegistry(), model="tiny", num_positions=16),
            rule=rule,
        )
        async with running(engine):
            recorders = await ask(engine, asked)
            load = engine.load()
    assert (load.running, load.waiting) == (0, 0)
    return recorders


def requests(sampling: SamplingParams) -> list[Request]:
    """One of each prompt, seed and length of prompt, all of one schema."""
    rng = random.Random(3)
    return [
        replace(
            make_request(
                rng.choices(range(3, 300), k=rng.randint(1, 20)),
                request_id=str(index),
                sampling=replace(sampling, seed=index),
                max_tokens=None,
            ),
            grammar=json_schema(PERSON),
        )
        for index in range(NUM_REQUESTS)
    ]


def check_valid(checkpoint: Checkpoint, recorders: Sequence[Recorder]) -> list[Answer]:
    answers = [recorder.answer() for recorder in recorders]
    for answer in answers:
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] == EOS_TOKEN_ID
        check_person(checkpoint.tokenizer.decode(answer.token_ids))
    return answers


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_x43_32_at_once_with_drafts_that_break_the_schema(
    checkpoint: Checkpoint, sampling: SamplingParams
) -> None:
    """All valid, and the same tokens and logprob bits whatever drafts."""
    asked = requests(sampling)
    plain = check_valid(checkpoint, await recorders_of(checkpoint, asked))
    for make_drafter, k in ((blind, 5), (same, 2), (ngram, 4)):
        recorders = await recorders_of(checkpoint, asked, make_drafter, k=k)
        assert check_valid(checkpoint, recorders) == plain
        assert sum(recorder.num_drafted for recorder in recorders) > NUM_REQUESTS
    assert len(set(plain)) == NUM_REQUESTS


@pytest.mark.parametrize("make_drafter", [blind, same])
async def test_x43_under_the_ratio_rule(
    checkpoint: Checkpoint, make_drafter: Callable[[Checkpoint, ExitStack], Drafter]
) -> None:
    """All valid under the other rule too."""
    recorders = await recorders_of(
        checkpoint, requests(SAMPLED), make_drafter, k=4, rule=Rule.RATIO
    )
    check_valid(checkpoint, recorders)


async def test_x43_a_request_that_fails_is_alone(checkpoint: Checkpoint) -> None:
    """Three fail, each in its way; the others get what they get by themselves.

    One is continued after tokens that break its grammar, one has a grammar that cannot be
    compiled, and one has to be longer than its grammar allows, which shows only in the middle.
    """
    asked = requests(SAMPLED)
    plain = [recorder.answer() for recorder in await recorders_of(checkpoint, asked)]
    broken = replace(asked[4], output_token_ids=checkpoint.tokenizer.encode("{]"))
    malformed = replace(asked[11], grammar=json_schema({"type": "text"}))
    short = make_request([7], request_id="17", sampling=SAMPLED, min_tokens=9, max_tokens=None)
    failing = {4: broken, 11: malformed, 17: replace(short, grammar=regex("[a-c]{5}"))}
    mixed = [failing.get(index, request) for index, request in enumerate(asked)]
    for make_drafter, k in ((off, 0), (blind, 3)):
        recorders = await recorders_of(checkpoint, mixed, make_drafter, k=k)
        for index, recorder in enumerate(recorders):
            if index in failing:
                assert recorder.deltas[-1].finish_reason is FinishReason.FAILED
                assert recorder.deltas[-1].error
            else:
                assert recorder.answer() == plain[index]
        assert [len(recorders[index].answer().token_ids) > 0 for index in failing] == [
            False,
            False,
            True,
        ]


async def test_a_preempted_sequence_goes_on_in_its_grammar(checkpoint: Checkpoint) -> None:
    """With memory for a few contexts only, answers are those of an engine with plenty."""
    asked = requests(SAMPLED)[:8]
    plain = [recorder.answer() for recorder in await recorders_of(checkpoint, asked)]
    tight = limits(block_size=16, num_blocks=34, max_num_seqs=8)
    recorders = await recorders_of(checkpoint, asked, blind, k=3, sizes=tight)
    assert check_valid(checkpoint, recorders) == plain


async def test_a_sequence_goes_on_elsewhere_in_its_grammar(checkpoint: Checkpoint) -> None:
    """An engine that is given the tokens so far continues as the one that emitted them."""
    asked = requests(SAMPLED)[:6]
    plain = [recorder.answer() for recorder in await recorders_of(checkpoint, asked)]
    moved = [
        replace(request, output_token_ids=answer.token_ids[: 3 + index])
        for index, (request, answer) in enumerate(zip(asked, plain, strict=True))
    ]
    recorders = await recorders_of(checkpoint, moved, ngram, k=4)
    for recorder, answer in zip(recorders, plain, strict=True):
        num_given = len(recorder.request.output_token_ids)
        assert recorder.answer().token_ids == answer.token_ids[num_given:]
        assert recorder.answer().logprobs == answer.logprobs[num_given:]


async def test_many_grammars_and_none_in_one_batch(checkpoint: Checkpoint) -> None:
    """Each sequence is held to its own grammar, and those without one to none."""
    kinds = (json_schema(PERSON), regex("[a-c]{3,9}"), lark('start: "one" ("," "two")~1..3'), None)
    asked = [
        replace(
            request, grammar=kinds[index % 4], stopping=replace(request.stopping, max_tokens=80)
        )
        for index, request in enumerate(requests(SAMPLED)[:16])
    ]
    alone = [(await recorders_of(checkpoint, [request]))[0].answer() for request in asked]
    together = await recorders_of(checkpoint, asked, blind, k=2)
    assert [recorder.answer() for recorder in together] == alone


@pytest.mark.model
async def test_the_real_model_with_ngram_drafts_answers_in_its_schema() -> None:
    """SmolLM2's 49,152 tokens, as the engine is built from a configuration: valid, and the same."""
    folder = resolve(BUILTIN_MODEL)
    tokenizer = load_tokenizer(folder)
    asked = [
        replace(
            make_request(
                tokenizer.chat([ChatMessage("user", f"Describe {who} in JSON.")]),
                request_id=who,
                sampling=SamplingParams(seed=index, temperature=0.8 * index),
                max_tokens=None,
            ),
            grammar=json_schema(PERSON),
        )
        for index, who in enumerate(("a red car", "the sea"))
    ]
    answers: list[list[Answer]] = []
    for drafter in (NoDrafterConfig(), NgramDrafterConfig()):
        config = DrafthouseConfig(drafter=drafter, speculation=SpeculationConfig(policy="fixed"))
        local = build_engine(config, registry=CollectorRegistry())
        async with running(local.engine) as engine:
            answers.append([recorder.answer() for recorder in await ask(engine, asked)])
        await local.close()
    assert answers[0] == answers[1]
    for answer in answers[0]:
        assert answer.finish_reason is FinishReason.STOP
        check_person(tokenizer.decode(answer.token_ids))
