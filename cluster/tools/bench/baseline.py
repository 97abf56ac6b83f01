"""Transformers' own generate beside the engine: the same weights, prompts and stops."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cluster.models.reference import load_generation_defaults
from cluster.request import Request
from cluster.tools.bench.figures import Wave
from cluster.tools.bench.streams import Arrival, Stream


class TransformersBaseline:
    """The same weights in float32, one batch of prompts at a time, padded on the left."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._eos_token_ids = load_generation_defaults(folder).eos_token_ids

    def run(self, requests: Sequence[Request]) -> Wave:
        """All requests in one batch, until each has ended.

        They share their temperature, max_tokens and ignore_eos. Every step takes all of them,
        so a request's tokens after its end are computed, and not counted.
        """
        prompts = [request.prompt_token_ids for request in requests]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        clock = _StepClock()
        start = time.perf_counter()
        outputs = self._model.generate(
            torch.tensor(
                [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
            ),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            pad_token_id=0,
            stopping_criteria=[clock],
            **_options(requests[0]),
        )
        seconds = time.perf_counter() - start
        answers = (
            self._answer(request, row[longest:].tolist())
            for request, row in zip(requests, outputs, strict=True)
        )
        return Wave(tuple(_stream(start, clock.times, answer) for answer in answers), seconds)

    def _answer(self, request: Request, token_ids: list[int]) -> list[int]:
        """A row of the output up to its end, the EOS included."""
        if request.stopping.ignore_eos:
            return token_ids
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in self._eos_token_ids:
                return token_ids[:count]
        return token_ids


def _options(request: Request) -> dict[str, Any]:
    """What the requests of a batch have in common, in transformers' words."""
    sampling, stopping = request.sampling, request.stopping
    length = {"max_new_tokens": stopping.max_tokens}
    if stopping.ignore_eos:
        length["min_new_tokens"] = stopping.max_tokens
    if sampling.temperature == 0:
        return length | {"do_sample": False}
    torch.manual_seed(sampling.seed)
    plain = {"do_sample": True, "top_k": 0, "top_p": 1.0}
    return length | plain | {"temperature": sampling.temperature}


def _stream(start: float, times: Sequence[float], token_ids: list[int]) -> Stream:
    """A row's tokens, one a step."""
    arrivals = [Arrival(moment, 1) for moment in times[: len(token_ids)]]
    return Stream(start, arrivals, token_ids)


class _StepClock:
    """A stopping criterion that stops nothing: transformers asks it after every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        del scores
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)
