"""A call that ends early ends its sequence within one step, at whatever moment it comes.

`served` checks after each test that every slot and block is back.
"""

import asyncio
from collections.abc import Mapping, Sequence

import grpc
import pytest
from grpc import aio

from cluster.interfaces import DraftQuery
from cluster.messages import Draft
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from protos import inference_pb2_grpc
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeModel, SameDrafter, SilentDrafter
from tests.harness import series
from tests.wire import PacedTarget, Wire, request, served, until

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, as small as can be."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=259))


class HeldDrafter(SameDrafter):
    """Thinks until it is let go, or cancelled."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """As SameDrafter, later."""
        self.num_asked += 1
        await self.may_answer.wait()
        return await super().propose(queries)


def outcomes(wire: Wire) -> dict[str, float]:
    """Requests that have ended, by outcome; those that did not happen are left out."""
    counted = series(wire.gateway_registry)
    start = "drafthouse_requests_total{outcome="
    return {
        name.removeprefix(start).rstrip("}"): value
        for name, value in counted.items()
        if name.startswith(start) and value
    }


def paced(wire: Wire) -> PacedTarget:
    """The server's target, which the test paces."""
    assert isinstance(wire.target, PacedTarget)
    return wire.target


async def cancelled(call: aio.UnaryStreamCall) -> None:
    """Cancel the call; the client sees CANCELLED."""
    call.cancel()
    assert await call.code() == grpc.StatusCode.CANCELLED


async def gone_within_a_step(wire: Wire) -> None:
    """The abort is counted; after at most the step under way nothing runs and none begins."""
    await until(lambda: outcomes(wire) == {"abort": 1})
    target = paced(wire)
    num_begun = target.num_begun
    target.allow()
    await until(lambda: wire.backend.engine.load().running == 0)
    target.allow(5)
    await asyncio.sleep(0.05)
    assert target.num_begun == num_begun
    assert wire.backend.engine.load().waiting == 0


async def test_x70_cancelled_while_queued(tokenizer: Tokenizer) -> None:
    """A request that waits for a slot leaves the queue; the one that runs is not disturbed."""
    async with served(
        tokenizer, tokenizer.encode("abc"), target=PacedTarget, max_num_seqs=1
    ) as wire:
        first = wire.stub.GenerateStream(request())
        await until(lambda: paced(wire).num_begun == 1)
        second = wire.stub.GenerateStream(request())
        await until(lambda: wire.backend.engine.load().waiting == 1)
        await cancelled(second)
        await until(lambda: wire.backend.engine.load().waiting == 0)
        assert outcomes(wire) == {"abort": 1}
        paced(wire).allow(10)
        assert "".join([chunk.text async for chunk in first]) == "abc"
        assert outcomes(wire) == {"abort": 1, "stop": 1}


async def test_x70_cancelled_in_prefill(tokenizer: Tokenizer) -> None:
    """Between two chunks of its prompt, before any token."""
    async with served(
        tokenizer, target=PacedTarget, max_num_batched_tokens=10, max_model_len=256
    ) as wire:
        call = wire.stub.GenerateStream(request(token_ids=[5] * 100))
        paced(wire).allow(2)
        await until(lambda: paced(wire).num_begun == 3)
        await cancelled(call)
        await gone_within_a_step(wire)


async def test_x70_cancelled_while_drafting(tokenizer: Tokenizer) -> None:
    """While the drafter thinks: the step that waits for it is the last."""
    async with served(
        tokenizer, tokenizer.encode("a" * 50), drafter=HeldDrafter, target=PacedTarget
    ) as wire:
        drafter = wire.backend.engine._proposer._drafter
        assert isinstance(drafter, HeldDrafter)
        call = wire.stub.GenerateStream(request())
        paced(wire).allow()
        await until(lambda: drafter.num_asked == 1)
        await cancelled(call)
        await until(lambda: outcomes(wire) == {"abort": 1})
        drafter.may_answer.set()
        paced(wire).allow(5)
        await until(lambda: wire.backend.engine.load().running == 0)
        assert paced(wire).num_begun <= 2
        assert drafter.num_asked == 1


async def test_x70_cancelled_while_verifying(tokenizer: Tokenizer) -> None:
    """In the middle of a target step with drafts in it."""
    async with served(tokenizer, tokenizer.encode("a" * 50), target=PacedTarget) as wire:
        call = wire.stub.GenerateStream(request())
        paced(wire).allow(2)
        await until(lambda: paced(wire).num_begun == 3)
        assert (await call.read()).token_ids
        await cancelled(call)
        await gone_within_a_step(wire)


async def test_x70_cancelled_at_the_last_token(tokenizer: Tokenizer) -> None:
    """In the step that would have ended the answer anyhow."""
    async with served(tokenizer, target=PacedTarget, drafter=SilentDrafter) as wire:
        call = wire.stub.GenerateStream(request(stopping={"max_tokens": 3, "ignore_eos": True}))
        paced(wire).allow(2)
        await until(lambda: paced(wire).num_begun == 3)
        await cancelled(call)
        await gone_within_a_step(wire)


async def test_x70_unary_call_cancelled(tokenizer: Tokenizer) -> None:
    """Generate is a stream inside, and ends as one."""
    async with served(tokenizer, tokenizer.encode("a" * 50), target=PacedTarget) as wire:
        call = wire.stub.Generate(request())
        paced(wire).allow(1)
        await until(lambda: paced(wire).num_begun == 2)
        call.cancel()
        assert await call.code() == grpc.StatusCode.CANCELLED
        await gone_within_a_step(wire)


async def test_x70_deadline_over(tokenizer: Tokenizer) -> None:
    """The client sees DEADLINE_EXCEEDED, and the sequence is gone without its help."""
    async with served(tokenizer, tokenizer.encode("a" * 50), target=PacedTarget) as wire:
        call = wire.stub.GenerateStream(request(), timeout=0.3)
        paced(wire).allow(1)
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await gone_within_a_step(wire)


async def test_x70_deadline_over_while_queued(tokenizer: Tokenizer) -> None:
    """A request may run out of time before it had a slot."""
    async with served(
        tokenizer, tokenizer.encode("abc"), target=PacedTarget, max_num_seqs=1
    ) as wire:
        first = wire.stub.GenerateStream(request())
        await until(lambda: paced(wire).num_begun == 1)
        second = wire.stub.GenerateStream(request(), timeout=0.1)
        assert await second.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: outcomes(wire) == {"abort": 1})
        await until(lambda: wire.backend.engine.load().waiting == 0)
        paced(wire).allow(10)
        assert "".join([chunk.text async for chunk in first]) == "abc"


async def test_x70_client_killed(tokenizer: Tokenizer) -> None:
    """A connection that is simply gone is a cancel."""
    async with served(tokenizer, tokenizer.encode("a" * 50), target=PacedTarget) as wire:
        channel = aio.insecure_channel(f"127.0.0.1:{wire.port}")
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request())
        paced(wire).allow(2)
        assert (await call.read()).token_ids
        await channel.close()
        await gone_within_a_step(wire)


async def test_x70_others_go_on(tokenizer: Tokenizer) -> None:
    """Seven of eight streams are cancelled; the eighth gets its whole answer."""
    async with served(tokenizer, tokenizer.encode("go on"), target=PacedTarget) as wire:
        calls = [wire.stub.GenerateStream(request()) for _ in range(8)]
        load = wire.backend.engine.load
        await until(lambda: load().running + load().waiting == 8)
        paced(wire).allow(1)
        for call in calls[1:]:
            await cancelled(call)
        await until(lambda: outcomes(wire) == {"abort": 7})
        paced(wire).allow(50)
        assert "".join([chunk.text async for chunk in calls[0]]) == "go on"
