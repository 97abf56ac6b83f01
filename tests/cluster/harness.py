"""The application on a Ray of this process's own, its clients, and the means to break it."""

import asyncio
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from grpc import aio
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cluster.actors import session
from cluster.actors.ports import free_ports
from cluster.config import DrafthouseConfig, parse_config
from cluster.local import build_engine
from cluster.request import Request, SamplingParams, StoppingParams
from protos import inference_pb2, inference_pb2_grpc

NUM_CPUS = 2
PATIENCE_SECONDS = 300.0  # a machine may be slow, and busy with others
NUM_TOKENS = 300  # of every answer
PROMPTS = tuple(tuple((7 * i + j) % 250 + 3 for j in range(5 + 3 * i)) for i in range(8))


@dataclass(frozen=True)
class Served:
    """Where an application can be reached."""

    config: DrafthouseConfig
    grpc: str
    http: str

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP answer."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Every series on the page: sample name, then its labels, then its value."""
        status, page = self.get("/metrics")
        assert status == 200
        series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert labels not in series.setdefault(sample.name, {}), "a series twice"
                series[sample.name][labels] = sample.value
        return series

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        return sum(
            value
            for key, value in self.metrics().get(name, {}).items()
            if labels.items() <= dict(key).items()
        )


@dataclass(frozen=True)
class Answer:
    """What must be the same however it came about."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def make_config(folder: object, **sections: object) -> DrafthouseConfig:
    """A configuration for a tiny target, on any free ports."""
    grpc_port, http_port = free_ports("127.0.0.1", 2)
    return parse_config(
        {
            "name": "tiny model",  # with a space, on purpose
            "target": {"model": str(folder), "max_model_len": 1024, "num_threads": 1},
            "speculation": {"policy": "fixed", "num_speculative_tokens": 4},
            "gateway": {
                "grpc_port": grpc_port,
                "http_port": http_port,
                "drain_seconds": 5.0,
            },
        }
        | sections
    )


def worker_drafter(folder: object) -> dict[str, object]:
    """A drafter section: this model, in a draft worker."""
    return {
        "kind": "model",
        "model": str(folder),
        "placement": "worker",
        "max_model_len": 1024,
        "num_threads": 1,
    }


@contextmanager
def application(config: DrafthouseConfig) -> Iterator[Served]:
    """Ray and the application, ready."""
    with session.local_ray(NUM_CPUS, config.gateway):
        port = session.await_ready(session.deploy(config), progress=lambda _: None)
        host = config.gateway.host
        yield Served(config, f"{host}:{port}", f"{host}:{config.gateway.http_port}")


@asynccontextmanager
async def client(served: Served) -> AsyncIterator[Any]:
    """A stub on a channel of its own."""
    async with aio.insecure_channel(served.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def message(
    prompt: Sequence[int], *, seed: int = 0, max_tokens: int = 64, speculate: bool = True
) -> inference_pb2.GenerateRequest:
    """A sampled request of a fixed length, with logprobs."""
    return inference_pb2.GenerateRequest(
        token_ids=prompt,
        sampling=inference_pb2.Sampling(temperature=0.8, seed=seed),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
        speculation=inference_pb2.Speculation(enabled=speculate),
        logprobs=True,
    )


async def ask(
    stub: Any,  # noqa: ANN401 - generated code has no types
    request: inference_pb2.GenerateRequest,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> tuple[Answer, Any]:
    """The streamed answer and its last chunk; `on_tokens` hears of every chunk's tokens."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    chunk = None
    async for chunk in stub.GenerateStream(request):
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
        on_tokens(len(chunk.token_ids))
    return Answer(tuple(token_ids), tuple(logprobs)), chunk


async def in_process(
    config: DrafthouseConfig, prompts: Sequence[Sequence[int]], **kwargs: int
) -> list[Answer]:
    """What an engine in this process, without Ray and without drafts, says to the same requests."""
    plain = parse_config(config.model_dump() | {"drafter": {"kind": "off"}})
    local = await asyncio.to_thread(build_engine, plain, registry=CollectorRegistry())
    running = asyncio.create_task(local.engine.run())
    answers = []
    for seed, prompt in enumerate(prompts):
        wire = message(prompt, seed=seed, **kwargs)
        request = Request(
            request_id=str(seed),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(seed=seed, temperature=wire.sampling.temperature),
            stopping=StoppingParams(max_tokens=wire.stopping.max_tokens, ignore_eos=True),
            logprobs=True,
        )
        deltas = [delta async for delta in local.engine.generate(request)]
        answers.append(
            Answer(
                tuple(token for delta in deltas for token in delta.token_ids),
                tuple(logprob for delta in deltas for logprob in delta.logprobs),
            )
        )
    await local.close()
    await running
    return answers


async def ask_all(
    served: Served, *, max_tokens: int, on_tokens: Callable[[int], None] = lambda _: None
) -> list[tuple[Answer, Any]]:
    """All of PROMPTS at once, each with its place as seed."""
    async with client(served) as stub:
        return await asyncio.gather(
            *(
                ask(stub, message(prompt, seed=seed, max_tokens=max_tokens), on_tokens)
                for seed, prompt in enumerate(PROMPTS)
            )
        )


def after_tokens(num_tokens: int, action: Callable[[], None]) -> Callable[[int], None]:
    """An `on_tokens` that does something once, in the middle of the streams."""
    seen = 0

    def count(more: int) -> None:
        nonlocal seen
        if seen < num_tokens <= seen + more:
            action()
        seen += more

    return count


def processes(title: str) -> list[psutil.Process]:
    """Descendants of this process that Ray gave a title beginning so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline() and process.cmdline()[0].startswith(title):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(title: str) -> None:
    """End the one process of that title as the kernel would."""
    [process] = processes(title)
    os.kill(process.pid, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; fail when it does not come about."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.2)
