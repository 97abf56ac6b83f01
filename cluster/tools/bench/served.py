"""The whole cluster from outside: a server of its own process, asked over gRPC."""

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from grpc import aio

from cluster.errors import TargetUnavailable
from cluster.messages import TokenDelta
from cluster.request import Request
from cluster.tools.bench.figures import Wave
from cluster.tools.bench.streams import Stream
from protos import inference_pb2, inference_pb2_grpc

READY = re.compile(r"ready grpc=(\S+) http=(\S+)")
START_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Address:
    """Of a server."""

    grpc: str
    http: str


@asynccontextmanager
async def served(
    config: Mapping[str, object], draft: str, *, num_speculative_tokens: int
) -> AsyncIterator[Address]:
    """Start `drafthouse serve` on free ports, say where it is, and end it on the way out."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "served.yaml"
        path.write_text(yaml.safe_dump(dict(config)))
        options = ("--draft", draft, "--num-speculative-tokens", str(num_speculative_tokens))
        async with _serving(path, *options) as address:
            yield address


@asynccontextmanager
async def _serving(config: Path, *more: str) -> AsyncIterator[Address]:
    command = Path(sys.executable).with_name("drafthouse")
    options = ("--grpc-port", "0", "--http-port", "0", *more)
    server = await asyncio.create_subprocess_exec(
        command, "serve", config, *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            yield await _address(server)
    finally:
        if server.returncode is None:
            server.send_signal(signal.SIGINT)
        await server.wait()


async def _address(server: asyncio.subprocess.Process) -> Address:
    assert server.stdout is not None
    async for line in server.stdout:
        if match := READY.search(line.decode()):
            return Address(*match.groups())
    raise TargetUnavailable("the server ended before it was ready")


async def run_served(address: Address, requests: Sequence[Request]) -> Wave:
    """All requests at once, each a stream of its own on one channel."""
    async with aio.insecure_channel(address.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        start = time.perf_counter()
        streams = [Stream(start) for _ in requests]
        await asyncio.gather(
            *(
                stream.follow(deltas(stub, _message(request)))
                for stream, request in zip(streams, requests, strict=True)
            )
        )
        return Wave(tuple(streams), time.perf_counter() - start)


async def deltas(
    stub: inference_pb2_grpc.InferenceStub,
    message: inference_pb2.GenerateRequest,
    metadata: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[TokenDelta]:
    """What comes of a request for one answer; how much was drafted is in the last delta."""
    async for chunk in stub.GenerateStream(message, metadata=metadata):
        yield TokenDelta(
            request_id=message.request_id,
            token_ids=tuple(chunk.token_ids),
            num_drafted=chunk.speculation.drafted,
            num_accepted=chunk.num_accepted,
        )


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
