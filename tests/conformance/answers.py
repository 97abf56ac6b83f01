"""What engines answer, whole, and whether that is what speculation off answers."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.messages import TopLogprobs
from cluster.request import Request
from tests.harness import Answer, Recorder, ask, running


async def answered(
    engine: Engine,
    asked: Sequence[Request],
    limits: EngineLimits,
    *,
    concurrency: int | None = None,
) -> list[Recorder]:
    """Every request's deltas; nothing of them is left in the engine.

    All are submitted at once, or with a `concurrency` at random times, so many under way at most.
    """
    async with running(engine):
        if concurrency is None:
            recorders = await ask(engine, asked)
        else:
            recorders = await _arriving(engine, asked, concurrency)
        load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    return recorders


async def _arriving(engine: Engine, asked: Sequence[Request], concurrency: int) -> list[Recorder]:
    rng = random.Random(concurrency)
    gate = asyncio.Semaphore(concurrency)

    async def one(request: Request) -> Recorder:
        async with gate:
            await asyncio.sleep(rng.random() * 0.003)
            [recorder] = await ask(engine, [request])
            return recorder

    return await asyncio.gather(*(one(request) for request in asked))


@dataclass(frozen=True)
class Whole:
    """All that must be the same, to the last bit."""

    answer: Answer
    prompt_logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]


def whole(recorder: Recorder) -> Whole:
    return Whole(
        recorder.answer(),
        recorder.prompt_logprobs,
        tuple(top for delta in recorder.deltas for top in delta.top_logprobs),
    )


@dataclass
class PlainAnswers:
    """What speculation off answers, by request and longest context; asked for when it is missed."""

    known: dict[tuple[Request, int], Whole] = field(default_factory=dict)

    async def check(
        self,
        recorders: Sequence[Recorder],
        limits: EngineLimits,
        plainly: Callable[[Sequence[Request]], Awaitable[list[Recorder]]],
    ) -> None:
        """Each answer equals the plain one."""
        context = limits.max_model_len
        missing = [r.request for r in recorders if (r.request, context) not in self.known]
        if missing:
            for plain in await plainly(missing):
                assert plain.num_drafted == 0
                self.known[plain.request, context] = whole(plain)
        for recorder in recorders:
            assert whole(recorder) == self.known[recorder.request, context]
