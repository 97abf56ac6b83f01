"""Engines on timed parts, and how fast they are once they are under way."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry

from cluster.control.policy import Policy
from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.interfaces import Drafter
from cluster.messages import TokenDelta
from cluster.metrics import EngineMetrics
from cluster.request import Request, SamplingParams, StoppingParams
from cluster.tools.bench.ideal import Roofline
from cluster.tools.bench.timed import VOCAB_SIZE, TimedWorker, mixed, true_token
from cluster.worker import TargetWorker, ThreadTarget

MAX_MODEL_LEN = 16384
PROMPT_TOKENS = 4
MAX_POSITIONS = 16  # per-position counters
PATIENCE_SECONDS = 60.0  # with a machine that makes no steps


@dataclass(frozen=True, slots=True)
class Steady:
    """What was delivered between two steps well apart."""

    num_tokens: int
    num_steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second of all sequences."""
        return self.num_tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        """Of a step, on average."""
        return self.seconds / self.num_steps


@asynccontextmanager
async def timed_engine(
    cost: Roofline, drafter: Drafter, policy: Policy, *, max_num_seqs: int
) -> AsyncIterator[Engine]:
    """An engine at work on a target that sleeps, ended on the way out; the drafter is not."""
    target = ThreadTarget(cast("TargetWorker", TimedWorker(cost)))  # it has all that is asked of it
    engine = Engine(
        target=target,
        drafter=drafter,
        policy=policy,
        limits=timed_limits(max_num_seqs),
        eos_token_ids=frozenset(),
        metrics=EngineMetrics(CollectorRegistry(), model="timed", num_positions=MAX_POSITIONS),
    )
    loop = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        await engine.close()
        await loop
        target.close()


def timed_limits(max_num_seqs: int) -> EngineLimits:
    """Room for everything; a block spans a whole context."""
    return EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        max_num_waiting=4096,
        block_size=MAX_MODEL_LEN,
        num_blocks=max_num_seqs,
        draft_deadline_seconds=1.0,
        prefix_cache=False,
    )


def timed_request(number: int, *, max_tokens: int) -> Request:
    """A request of its own prompt, greedy."""
    return Request(
        request_id=f"timed-{number}",
        prompt_token_ids=tuple(mixed(number, place) % VOCAB_SIZE for place in range(PROMPT_TOKENS)),
        sampling=SamplingParams(seed=number, temperature=0.0),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def is_true(request: Request, token_ids: Sequence[int]) -> bool:
    """Whether an answer is the one and only of the timed target."""
    before = (request.prompt_token_ids[-1], *token_ids)[:-1]
    first = len(request.prompt_token_ids)
    return all(
        token_id == true_token(previous, position)
        for position, (previous, token_id) in enumerate(
            zip(before, token_ids, strict=True), start=first
        )
    )


async def steady_rate(
    engine: Engine, *, num_sequences: int, warm_up: float, seconds: float
) -> Steady:
    """Run endless sequences for so long, longer where steps are, and count from step to step.

    Raises ValueError when a token is not the target's, TimeoutError when no steps are made.
    """
    requests = [timed_request(number, max_tokens=MAX_MODEL_LEN) for number in range(num_sequences)]
    arrivals: list[list[tuple[float, int]]] = [[] for _ in requests]
    token_ids: list[list[int]] = [[] for _ in requests]
    for number, request in enumerate(requests):

        def emit(delta: TokenDelta, number: int = number) -> None:
            arrivals[number].append((time.perf_counter(), len(delta.token_ids)))
            token_ids[number].extend(delta.token_ids)

        engine.submit(request, emit)
    begin = time.perf_counter() + warm_up
    await asyncio.sleep(warm_up + seconds)
    async with asyncio.timeout(PATIENCE_SECONDS):
        # polled, so that what is measured has no more to do
        while len(_moments(arrivals[0], begin)) < 2:  # noqa: PLR2004, ASYNC110 - two ends
            await asyncio.sleep(seconds)
    for request in requests:
        engine.abort(request.request_id)
    if not all(map(is_true, requests, token_ids)):
        raise ValueError("the engine delivered what the target never said")
    return _between_steps(arrivals, begin)


def _between_steps(arrivals: Sequence[Sequence[tuple[float, int]]], begin: float) -> Steady:
    """From the first to the last arrival of the first sequence, of all that came since."""
    moments = _moments(arrivals[0], begin)
    first, last = moments[0], moments[-1]
    return Steady(
        sum(
            num_tokens
            for sequence in arrivals
            for moment, num_tokens in sequence
            if first < moment <= last
        ),
        len(moments) - 1,
        last - first,
    )


def _moments(arrivals: Sequence[tuple[float, int]], begin: float) -> list[float]:
    """When tokens arrived since."""
    return [moment for moment, num_tokens in arrivals if moment >= begin and num_tokens]
