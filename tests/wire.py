"""A real server on a real socket, over a real engine whose target computes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc import aio
from prometheus_client import CollectorRegistry

from cluster.engine.engine import Engine
from cluster.interfaces import Target
from cluster.messages import ModelInfo, SamplingSpec, StepInput, StepOutput, TokenDelta
from cluster.metrics import GatewayMetrics
from cluster.models.reference import GenerationDefaults
from cluster.request import Request
from cluster.text.tokenizer import Tokenizer
from deployments.auth import Authenticator
from deployments.fair_use import FairUse
from deployments.grpc_service import InferenceService, build_server
from deployments.schemas import RequestReader
from protos import inference_pb2, inference_pb2_grpc
from tests.fakes import FakeDrafter, FakeModel, FakeTarget, SameDrafter
from tests.harness import make_engine, make_limits, running

MODEL = "tiny model"  # a name with a space, on purpose
EOS = 2
NUM_PROMPT = 3
PROMPT = (5, 6, 7)
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class ScriptedModel(FakeModel):
    """Continues any prompt of `NUM_PROMPT` tokens with `script`, then with EOS."""

    script: tuple[int, ...] = ()

    def next_token(self, state: int, position: int, sampling: SamplingSpec) -> int:
        """The script's token, whatever the prefix is."""
        del state, sampling
        place = position - NUM_PROMPT
        return self.script[place] if 0 <= place < len(self.script) else EOS


class PacedTarget(FakeTarget):
    """Does a step only when it was allowed one."""

    def __init__(self, model: FakeModel, **sizes: int) -> None:
        super().__init__(model, **sizes)  # type: ignore[arg-type]
        self.allowed = asyncio.Semaphore(0)
        self.num_begun = 0

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget, once it may."""
        self.num_begun += 1
        await self.allowed.acquire()
        return await super().step(step)

    def allow(self, num_steps: int = 1) -> None:
        """Let so many more steps happen."""
        for _ in range(num_steps):
            self.allowed.release()


@dataclass
class EngineBackend:
    """One engine in this process behind the service."""

    engine: Engine
    model: ModelInfo
    is_ready: bool = True
    requests: list[Request] = field(default_factory=list)

    def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """The engine's own."""
        self.requests.append(request)
        return self.engine.generate(request)

    def ready(self) -> bool:
        """As the test says."""
        return self.is_ready

    def describe(self) -> ModelInfo:
        """As given."""
        return self.model


@dataclass
class Answer:
    """A whole streamed answer, the only one or one of several."""

    chunks: list[inference_pb2.GenerateChunk]

    @property
    def text(self) -> str:
        """All text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """All token ids."""
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """All logprobs."""
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def last(self) -> inference_pb2.GenerateChunk:
        """The message with the account."""
        return self.chunks[-1]


@dataclass(frozen=True)
class Door:
    """How a server is entered; open to everyone in plaintext unless a test says else."""

    authenticator: Authenticator | None = None
    credentials: grpc.ServerCredentials | None = None
    reflects: bool = True
    fair_use: FairUse | None = None
    client: grpc.ChannelCredentials | None = None

    def knock(self, port: int) -> aio.Channel:
        """A channel that may come in."""
        if self.client is None:
            return aio.insecure_channel(f"127.0.0.1:{port}")
        return aio.secure_channel(f"localhost:{port}", self.client)


@dataclass
class Wire:
    """What a test talks to, and what it looks into."""

    port: int
    channel: aio.Channel
    stub: inference_pb2_grpc.InferenceStub
    backend: EngineBackend
    target: Target
    gateway_registry: CollectorRegistry
    engine_registry: CollectorRegistry

    async def ask(self, **fields: object) -> Answer:
        """The answer to a request for one."""
        (answer,) = await self.ask_several(**fields)
        return answer

    async def ask_several(self, **fields: object) -> list[Answer]:
        """All answers to a request, by their index."""
        chunks = [chunk async for chunk in self.stub.GenerateStream(request(**fields))]
        num_answers = 1 + max(chunk.answer_index for chunk in chunks)
        return [
            Answer([chunk for chunk in chunks if chunk.answer_index == index])
            for index in range(num_answers)
        ]


def request(**fields: object) -> inference_pb2.GenerateRequest:
    """A request of plain data; three token ids are its prompt if it says nothing else."""
    if not fields.keys() & {"prompt", "messages", "token_ids"}:
        fields["token_ids"] = PROMPT
    return inference_pb2.GenerateRequest(**fields)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what another task is about to make true."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110 - a counter or a queue, which has no event to wait for
            await asyncio.sleep(0.002)


@asynccontextmanager
async def served(
    tokenizer: Tokenizer,
    script: Sequence[int] = (),
    *,
    model: Callable[[int, tuple[int, ...]], FakeModel] = ScriptedModel,
    drafter: Callable[[FakeModel], FakeDrafter] = SameDrafter,
    target: Callable[..., FakeTarget] = FakeTarget,
    num_speculative_tokens: int = 4,
    max_message_bytes: int = 2**20,
    door: Door | None = None,
    **limits: float,
) -> AsyncIterator[Wire]:
    """A server up inside the block; afterwards nothing of any request may be left.

    `model` is made of the size of the vocabulary and the script.
    """
    engine_limits = make_limits(**({"vocab_size": tokenizer.num_tokens} | limits))
    fake_model = model(engine_limits.vocab_size, tuple(script))
    fake = target(
        fake_model,
        num_blocks=engine_limits.num_blocks,
        block_size=engine_limits.block_size,
        max_model_len=engine_limits.max_model_len,
    )
    engine_registry = CollectorRegistry()
    engine = make_engine(
        fake,
        drafter(fake_model),
        limits=engine_limits,
        num_speculative_tokens=num_speculative_tokens,
        eos_token_ids=(EOS,),
        registry=engine_registry,
    )
    info = ModelInfo(
        name=MODEL,
        max_model_len=engine_limits.max_model_len,
        vocab_size=engine_limits.vocab_size,
        drafters=("fake",),
    )
    async with serving(
        engine,
        info,
        tokenizer,
        target=fake,
        engine_registry=engine_registry,
        max_message_bytes=max_message_bytes,
        door=door,
    ) as wire:
        yield wire


@asynccontextmanager
async def serving(
    engine: Engine,
    info: ModelInfo,
    tokenizer: Tokenizer,
    *,
    target: Target,
    engine_registry: CollectorRegistry,
    max_message_bytes: int = 2**20,
    door: Door | None = None,
) -> AsyncIterator[Wire]:
    """A server of this engine, up inside the block; afterwards nothing may be left in it."""
    backend = EngineBackend(engine, info)
    reader = RequestReader(info, tokenizer, GenerationDefaults(eos_token_ids=frozenset({EOS})))
    gateway_registry = CollectorRegistry()
    at_rest = engine.load().free_blocks
    door = door or Door()
    async with running(engine):
        server, port = build_server(
            InferenceService(
                backend,
                reader,
                GatewayMetrics(gateway_registry, model=info.name),
                door.fair_use,
            ),
            host="127.0.0.1",
            port=0,
            max_message_bytes=max_message_bytes,
            authenticator=door.authenticator,
            credentials=door.credentials,
            reflects=door.reflects,
        )
        await server.start()
        try:
            async with door.knock(port) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                yield Wire(port, channel, stub, backend, target, gateway_registry, engine_registry)
        finally:
            await server.stop(None)
        await until(lambda: engine.load().running == engine.load().waiting == 0)
        assert engine.load().free_blocks == at_rest
