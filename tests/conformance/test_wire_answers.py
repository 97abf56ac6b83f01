"""Several answers to one request: each is what its seed alone gets, and they live and die together.

`served` checks after each test that every slot and block is back.
"""

import asyncio

import grpc
import pytest
from grpc import aio

from cluster.request import answer_seed
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeModel
from tests.harness import series
from tests.wire import NUM_PROMPT, Answer, PacedTarget, Wire, request, served, until

pytestmark = pytest.mark.wire

SEED = 7
SIZE = 20  # tokens of each answer
FIELDS: dict[str, object] = {
    "stopping": {"max_tokens": SIZE, "ignore_eos": True},
    "logprobs": True,
}


def drawing(vocab_size: int, script: tuple[int, ...]) -> FakeModel:
    """A model that draws by the seed."""
    del script
    return FakeModel(vocab_size)


def sampling(num_answers: int, seed: int = SEED) -> dict[str, object]:
    """At temperature 1."""
    return {"temperature": 1.0, "seed": seed, "num_answers": num_answers}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, as small as can be."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=259))


async def alone(wire: Wire, num_answers: int) -> list[Answer]:
    """What the seeds of the answers get in requests of their own."""
    seeds = [answer_seed(SEED, index) for index in range(num_answers)]
    return [await wire.ask(sampling=sampling(1, seed), **FIELDS) for seed in seeds]


def same(answers: list[Answer], others: list[Answer]) -> bool:
    """Equal in all that is one answer's own."""
    return [
        (a.text, a.token_ids, a.logprobs, a.last.finish_reason, a.last.seed) for a in answers
    ] == [(a.text, a.token_ids, a.logprobs, a.last.finish_reason, a.last.seed) for a in others]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
async def test_each_answer_is_that_of_its_seed(tokenizer: Tokenizer, max_num_seqs: int) -> None:
    """To the last bit, whether they run together or wait for one another."""
    async with served(tokenizer, model=drawing, max_num_seqs=max_num_seqs) as wire:
        answers = await wire.ask_several(sampling=sampling(5), **FIELDS)
        assert same(answers, await alone(wire, 5))
    assert len({tuple(answer.token_ids) for answer in answers}) == 5


async def test_x60_the_account_of_several_answers(tokenizer: Tokenizer) -> None:
    """Usage and speculation are sums, the prompt counted once, in the last message of the call."""
    async with served(tokenizer, model=drawing) as wire:
        message = request(sampling=sampling(4), **FIELDS)
        chunks = [chunk async for chunk in wire.stub.GenerateStream(message)]
        gateway, engine = series(wire.gateway_registry), series(wire.engine_registry)
    last = chunks[-1]
    assert not any(
        chunk.HasField("usage") or chunk.HasField("speculation") for chunk in chunks[:-1]
    )
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (NUM_PROMPT, 4 * SIZE)
    assert last.usage.total_tokens == NUM_PROMPT + 4 * SIZE
    assert last.speculation.steps == sum(chunk.num_steps for chunk in chunks)
    assert last.speculation.accepted == sum(chunk.num_accepted for chunk in chunks)
    assert engine["drafthouse_spec_decode_num_draft_tokens_total"] == last.speculation.drafted
    assert engine["drafthouse_engine_tokens_total"] == 4 * SIZE
    assert gateway["drafthouse_requests_total{outcome=length}"] == 1
    assert gateway["drafthouse_prompt_tokens_total"] == NUM_PROMPT
    assert gateway["drafthouse_generation_tokens_total"] == 4 * SIZE
    assert gateway["drafthouse_time_to_first_token_seconds_count"] == 4
    for index in range(4):
        own = [chunk for chunk in chunks if chunk.answer_index == index]
        assert [chunk.finish_reason != 0 for chunk in own] == [False] * (len(own) - 1) + [True]
        assert [chunk.HasField("seed") for chunk in own] == [False] * (len(own) - 1) + [True]


async def test_answers_come_mixed(tokenizer: Tokenizer) -> None:
    """No answer waits for another's end."""
    async with served(tokenizer, model=drawing, max_num_seqs=4) as wire:
        message = request(sampling=sampling(4), **FIELDS)
        order = [chunk.answer_index async for chunk in wire.stub.GenerateStream(message)]
    assert order != sorted(order)
    assert set(order[:4]) == {0, 1, 2, 3}


async def test_unary_holds_all_answers(tokenizer: Tokenizer) -> None:
    """Generate is the stream collected, answer by answer."""
    async with served(tokenizer, model=drawing) as wire:
        message = request(sampling=sampling(3), **FIELDS)
        whole = await wire.stub.Generate(message)
        streamed = await wire.ask_several(sampling=sampling(3), **FIELDS)
    assert [(a.text, a.token_ids, a.logprobs, a.finish_reason, a.seed) for a in whole.answers] == [
        (a.text, a.token_ids, a.logprobs, a.last.finish_reason, a.last.seed) for a in streamed
    ]
    accounts = [answer.last for answer in streamed if answer.last.HasField("usage")]
    assert [(whole.usage, whole.speculation)] == [(a.usage, a.speculation) for a in accounts]


async def test_answers_of_a_drawn_seed_can_be_had_again(tokenizer: Tokenizer) -> None:
    """What the first answer says its seed was gives all of them again."""
    async with served(tokenizer, model=drawing) as wire:
        drawn = {"temperature": 1.0, "num_answers": 3}
        answers = await wire.ask_several(sampling=drawn, **FIELDS)
        again = await wire.ask_several(sampling=drawn | {"seed": answers[0].last.seed}, **FIELDS)
    assert same(again, answers)


def paced(wire: Wire) -> PacedTarget:
    """The server's target, which the test paces."""
    assert isinstance(wire.target, PacedTarget)
    return wire.target


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
async def test_x70_a_cancel_ends_all_answers(
    tokenizer: Tokenizer, method: str, max_num_seqs: int
) -> None:
    """Those that run and those that wait, within the step under way; counted as one request."""
    async with served(
        tokenizer, model=drawing, target=PacedTarget, max_num_seqs=max_num_seqs
    ) as wire:
        load = wire.backend.engine.load
        call = getattr(wire.stub, method)(request(sampling=sampling(4), **FIELDS))
        await until(lambda: load().running + load().waiting == 4)
        paced(wire).allow(2)
        await until(lambda: paced(wire).num_begun == 3)
        call.cancel()
        assert await call.code() == grpc.StatusCode.CANCELLED
        await until(
            lambda: series(wire.gateway_registry)["drafthouse_requests_total{outcome=abort}"] == 1
        )
        paced(wire).allow()
        await until(lambda: load().running + load().waiting == 0)
        paced(wire).allow(5)
        await asyncio.sleep(0.05)
        assert paced(wire).num_begun == 3


async def test_x78_a_queue_without_room_for_all_takes_none(tokenizer: Tokenizer) -> None:
    """Answers that found a place give it back; whoever was there before goes on."""
    async with served(
        tokenizer,
        tokenizer.encode("abc"),
        target=PacedTarget,
        max_num_seqs=1,
        max_num_waiting=3,
    ) as wire:
        load = wire.backend.engine.load
        first = wire.stub.GenerateStream(request())
        await until(lambda: load().running == 1)
        with pytest.raises(aio.AioRpcError) as refused:
            await wire.stub.Generate(request(sampling={"num_answers": 4}))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert load().waiting == 0
        assert series(wire.gateway_registry)["drafthouse_requests_total{outcome=refused}"] == 1
        paced(wire).allow(50)
        assert "".join([chunk.text async for chunk in first]) == "abc"


async def test_x32_each_answer_is_cut_at_its_own_stop(tokenizer: Tokenizer) -> None:
    """A stop text in one answer ends that one; the others go to their length."""
    async with served(tokenizer, model=drawing, num_speculative_tokens=5) as wire:
        plain = await wire.ask_several(sampling=sampling(3), **FIELDS)
        stop = next(text for text in plain[1].text if text.isascii() and text not in plain[0].text)
        stopping = {"max_tokens": SIZE, "ignore_eos": True, "stop": [stop]}
        cut = await wire.ask_several(sampling=sampling(3), stopping=stopping, logprobs=True)
    for answer, before in zip(cut, plain, strict=True):
        size = len(answer.token_ids)
        assert answer.token_ids == before.token_ids[:size]
        assert answer.logprobs == before.logprobs[:size]
        assert answer.text == before.text.split(stop)[0]
        stopped = stop in before.text
        assert (answer.last.finish_reason == inference_pb2.FINISH_REASON_STOP) == stopped
    assert cut[1].last.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert cut[0].last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
