"""The whole cluster from outside: a server of its own process, asked over gRPC."""

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from grpc import aio

from cluster.errors import TargetUnavailable
from cluster.request import Request
from cluster.tools.bench.decode import Run
from protos import inference_pb2, inference_pb2_grpc

READY = re.compile(r"ready grpc=(\S+) http=(\S+)")
START_SECONDS = 300


@asynccontextmanager
async def served(target: str, draft: str) -> AsyncIterator[str]:
    """Start `drafthouse serve`, give its gRPC address, and end it on the way out."""
    command = Path(sys.executable).with_name("drafthouse")
    options = ("--target", target, "--draft", draft, "--grpc-port", "0", "--http-port", "0")
    server = await asyncio.create_subprocess_exec(
        command, "serve", *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            yield await _address(server)
    finally:
        if server.returncode is None:
            server.send_signal(signal.SIGINT)
        await server.wait()


async def _address(server: asyncio.subprocess.Process) -> str:
    assert server.stdout is not None
    async for line in server.stdout:
        if match := READY.search(line.decode()):
            return match.group(1)
    raise TargetUnavailable("the server ended before it was ready")


async def run_served(address: str, requests: Sequence[Request]) -> Run:
    """All requests at once, each a stream of its own on one channel."""
    async with aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        start = time.perf_counter()
        runs = await asyncio.gather(*(_stream(stub, request) for request in requests))
        seconds = time.perf_counter() - start
    return Run(
        num_tokens=sum(run.num_tokens for run in runs),
        seconds=seconds,
        num_steps=sum(run.num_steps for run in runs),
    )


async def _stream(stub: inference_pb2_grpc.InferenceStub, request: Request) -> Run:
    num_tokens = num_steps = 0
    async for chunk in stub.GenerateStream(_message(request)):
        num_tokens += len(chunk.token_ids)
        num_steps += bool(chunk.token_ids)
    return Run(num_tokens, 0.0, num_steps)


def _message(request: Request) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=request.prompt_token_ids,
        sampling=inference_pb2.Sampling(
            temperature=request.sampling.temperature, seed=request.sampling.seed
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=request.stopping.max_tokens, ignore_eos=request.stopping.ignore_eos
        ),
        speculation=inference_pb2.Speculation(enabled=request.speculation.enabled),
    )
