"""Tokens a second of the engine in this process, and of transformers' own generate beside it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cluster.local import LocalEngine
from cluster.messages import TokenDelta
from cluster.request import Request, SamplingParams, SpeculationParams, StoppingParams


@dataclass(frozen=True, slots=True)
class Run:
    """What some requests brought, and the wall time it took."""

    num_tokens: int
    seconds: float
    num_steps: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over wall time."""
        return self.num_tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens a sequence gained in a step, on average."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0

    def __add__(self, other: "Run") -> "Run":
        return Run(
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.num_steps + other.num_steps,
        )


def greedy_request(
    request_id: str, prompt: Sequence[int], *, max_tokens: int, speculate: bool, ignore_eos: bool
) -> Request:
    """A greedy request with or without drafts."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(seed=0, temperature=0.0),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        speculation=SpeculationParams(enabled=speculate),
    )


async def run_engine(local: LocalEngine, requests: Sequence[Request]) -> Run:
    """All requests at once, from the first submission to the last token."""
    start = time.perf_counter()
    deltas = await asyncio.gather(*(_deltas(local, request) for request in requests))
    seconds = time.perf_counter() - start
    flat = [delta for per_request in deltas for delta in per_request]
    return Run(
        num_tokens=sum(len(delta.token_ids) for delta in flat),
        seconds=seconds,
        num_steps=sum(bool(delta.token_ids) for delta in flat),
    )


async def run_engine_decode(local: LocalEngine, requests: Sequence[Request]) -> Run:
    """All requests at once, without their prompts: from when each has a token to the last one."""
    times = await asyncio.gather(*(_token_times(local, request) for request in requests))
    return _decode_run(times)


async def _token_times(local: LocalEngine, request: Request) -> list[float]:
    """When each token came."""
    times: list[float] = []
    async for delta in local.engine.generate(request):
        times += [time.perf_counter()] * len(delta.token_ids)
    return times


def _decode_run(times: Sequence[Sequence[float]]) -> Run:
    """Tokens by sequence and when they came, counted from when every sequence had its first."""
    start = max(of_one[0] for of_one in times)
    after = [moment for of_one in times for moment in of_one if moment > start]
    return Run(len(after), max(after) - start, num_steps=len(after))


async def _deltas(local: LocalEngine, request: Request) -> list[TokenDelta]:
    return [delta async for delta in local.engine.generate(request)]


class TransformersBaseline:
    """The same weights through transformers' generate, the batch padded on the left."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def run_decode(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Run:
        """Greedy, `max_tokens` new tokens for each prompt in one batch, without the prompts."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        clock = _StepClock()
        self._model.generate(
            torch.tensor(
                [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
            ),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        return _decode_run([clock.times] * len(prompts))


class _StepClock:
    """A stopping criterion that stops nothing: transformers asks it after every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        del scores
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)
