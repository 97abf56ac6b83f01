"""The server itself: what it says of its state, what it refuses, and that it stays up."""

import itertools
import random
import re

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.errors import ConfigurationError, DrafthouseError, Overloaded, TargetUnavailable
from cluster.messages import StepInput, StepOutput
from cluster.metrics import GatewayMetrics, collect, render
from cluster.models.reference import GenerationDefaults
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from deployments.grpc_service import SERVICE_NAME, InferenceService, build_server
from deployments.schemas import RequestReader
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeTarget
from tests.harness import series
from tests.wire import MODEL, PROMPT, PacedTarget, Wire, request, served, until

pytestmark = pytest.mark.wire

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
EXPECTED_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


async def failure(wire: Wire, **fields: object) -> aio.AioRpcError:
    """How the request fails; it must."""
    with pytest.raises(aio.AioRpcError) as raised:
        await wire.stub.Generate(request(**fields))
    return raised.value


async def test_health_follows_the_backend(tokenizer: Tokenizer) -> None:
    """Check and Watch say what is true now, for the service and for the server as a whole."""
    async with served(tokenizer) as wire:
        health = health_pb2_grpc.HealthStub(wire.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == SERVING
        wire.backend.is_ready = False
        assert (await watch.read()).status == NOT_SERVING
        for service in ("", SERVICE_NAME):
            checked = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert checked.status == NOT_SERVING
        listed = await health.List(health_pb2.HealthListRequest())
        assert listed.statuses[SERVICE_NAME].status == NOT_SERVING
        wire.backend.is_ready = True
        assert (await watch.read()).status == SERVING
        watch.cancel()
        with pytest.raises(aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="other"))
        unknown_status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert (await watch.read()).status == unknown_status
        watch.cancel()


async def test_x77_not_ready_is_unavailable_with_a_hint(tokenizer: Tokenizer) -> None:
    """Before the first target is ready, callers are told to come again, and when."""
    async with served(tokenizer) as wire:
        wire.backend.is_ready = False
        error = await failure(wire)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


async def test_reflection_describes_the_service(tokenizer: Tokenizer) -> None:
    """A client without our files finds the service and its messages."""
    async with served(tokenizer) as wire:
        stub = reflection_pb2_grpc.ServerReflectionStub(wire.channel)
        ask = reflection_pb2.ServerReflectionRequest
        call = stub.ServerReflectionInfo(
            iter([ask(list_services=""), ask(file_containing_symbol=SERVICE_NAME)])
        )
        services, file = [answer async for answer in call]
    names = {service.name for service in services.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    assert b"GenerateStream" in file.file_descriptor_response.file_descriptor_proto[0]


async def test_get_model(tokenizer: Tokenizer) -> None:
    """Name, context, drafters, exactness, and every field with how it is served."""
    async with served(tokenizer, max_model_len=128) as wire:
        model = await wire.stub.GetModel(inference_pb2.GetModelRequest(model=MODEL))
    assert (model.name, model.max_model_len, list(model.drafters)) == (MODEL, 128, ["fake"])
    assert model.bit_exact
    assert model.verification == inference_pb2.VERIFICATION_COUPLED
    support = {field.name: field.support for field in model.fields}
    assert support["sampling.top_p"] == inference_pb2.Field.SUPPORT_EXACT
    assert support["sampling.logit_bias"] == inference_pb2.Field.SUPPORT_EXACT
    assert support["sampling.best_of"] == inference_pb2.Field.SUPPORT_REFUSED


async def test_get_model_names_what_is_not_exact(tokenizer: Tokenizer) -> None:
    """A target whose bits depend on company says which operation it is."""
    async with served(tokenizer) as wire:
        wire.backend.model = wire.backend.model.__class__(
            name=MODEL,
            max_model_len=8,
            vocab_size=8,
            drafters=(),
            verification="ratio",
            variant_operations=("linear",),
        )
        model = await wire.stub.GetModel(inference_pb2.GetModelRequest())
    assert not model.bit_exact
    assert list(model.variant_operations) == ["linear"]
    assert model.verification == inference_pb2.VERIFICATION_RATIO


async def test_unknown_model_is_not_found(tokenizer: Tokenizer) -> None:
    """On every call that names a model."""
    async with served(tokenizer) as wire:
        calls = (
            wire.stub.Generate(request(model="other")),
            wire.stub.GenerateStream(request(model="other")),
            wire.stub.Tokenize(inference_pb2.TokenizeRequest(model="other", prompt="a")),
            wire.stub.Detokenize(inference_pb2.DetokenizeRequest(model="other")),
            wire.stub.GetModel(inference_pb2.GetModelRequest(model="other")),
        )
        for call in calls:
            assert await call.code() == grpc.StatusCode.NOT_FOUND
            assert f"served: {MODEL}" in await call.details()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"stopping": {"stop": [""]}}, "stopping.stop[0]"),
        ({"token_ids": [5] * 256}, "token_ids"),
        ({"prompt": "a" * 20_000}, "prompt"),
        ({"model": MODEL, "messages": [{"role": "👽" * 5000}]}, "messages[0].role"),
    ],
)
async def test_bad_input_is_named(
    tokenizer: Tokenizer, fields: dict[str, object], field: str
) -> None:
    """INVALID_ARGUMENT, the field first, however long what the caller sent was."""
    async with served(tokenizer) as wire:
        error = await failure(wire, **fields)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(f"{field}: ")
        assert series(wire.gateway_registry)["drafthouse_requests_total{outcome=refused}"] == 1


async def test_x78_overload_is_resource_exhausted_with_a_hint(tokenizer: Tokenizer) -> None:
    """A full queue refuses at once, tells when to come again, and disturbs nobody."""
    async with served(
        tokenizer,
        tokenizer.encode("abc"),
        target=PacedTarget,
        max_num_seqs=1,
        max_num_waiting=1,
    ) as wire:
        first = wire.stub.GenerateStream(request())
        await until(lambda: wire.backend.engine.load().running == 1)
        second = wire.stub.GenerateStream(request())
        await until(lambda: wire.backend.engine.load().waiting == 1)
        error = await failure(wire)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        assert isinstance(wire.target, PacedTarget)
        wire.target.allow(50)
        for call in (first, second):
            assert "".join([chunk.text async for chunk in call]) == "abc"


class BrokenTarget(FakeTarget):
    """Fails with something that nobody outside should read."""

    async def step(self, step: StepInput) -> StepOutput:
        """Never."""
        del step
        message = "secret in /etc/shadow"
        raise TargetUnavailable(message)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_faults_of_ours_are_internal_and_say_nothing(tokenizer: Tokenizer) -> None:
    """No path and no stack leaves the server; the failure is counted as an error."""
    errors = []

    async def serve_once() -> None:
        async with served(tokenizer, target=BrokenTarget) as wire:
            errors.append(await failure(wire))
            assert series(wire.gateway_registry)["drafthouse_requests_total{outcome=error}"] == 1

    with pytest.raises(TargetUnavailable):  # the engine's own end, which its supervisor sees
        await serve_once()
    assert errors[0].code() == grpc.StatusCode.INTERNAL
    assert not re.search(r"secret|shadow|Traceback|\.py|/", errors[0].details())


async def test_an_answer_the_server_ends_may_be_asked_again(tokenizer: Tokenizer) -> None:
    """When it was not the caller who aborted, it is told so, and not given half an answer."""
    async with served(tokenizer, tokenizer.encode("a" * 50), target=PacedTarget) as wire:
        assert isinstance(wire.target, PacedTarget)
        call = wire.stub.GenerateStream(request())
        wire.target.allow()
        assert (await call.read()).text == "a"
        wire.backend.engine.abort(wire.backend.requests[0].request_id)
        wire.target.allow()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        assert series(wire.gateway_registry)["drafthouse_requests_total{outcome=error}"] == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded(waiting=3, limit=3), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (TargetUnavailable("none is left"), grpc.StatusCode.UNAVAILABLE),
        (DrafthouseError("inside"), grpc.StatusCode.INTERNAL),
        (ValueError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_errors_at_the_call_have_their_code(
    tokenizer: Tokenizer, error: Exception, code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one table decides, whether a backend raises at once or later; then it goes on."""
    async with served(tokenizer, tokenizer.encode("ok")) as wire:
        with monkeypatch.context() as patch:

            def refuse(_: object) -> None:
                raise error

            patch.setattr(wire.backend, "generate", refuse)
            assert (await failure(wire)).code() == code
        assert (await wire.ask()).text == "ok"


async def test_x71_past_the_cap_is_resource_exhausted(tokenizer: Tokenizer) -> None:
    """A message over the configured cap is refused with the cap; one under it is read."""
    async with served(tokenizer, max_message_bytes=50_000) as wire:
        assert (await failure(wire, prompt="a" * 40_000)).code() == (
            grpc.StatusCode.INVALID_ARGUMENT
        )
        error = await failure(wire, prompt="a" * 60_000)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "50000" in error.details()


async def test_two_servers_on_one_port_fail_loudly(tokenizer: Tokenizer) -> None:
    """The second is refused at start instead of taking half of the first one's clients."""
    async with served(tokenizer) as wire:
        reader = RequestReader(
            wire.backend.model, tokenizer, GenerationDefaults(eos_token_ids=frozenset())
        )
        metrics = GatewayMetrics(type(wire.gateway_registry)(), model=MODEL)
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{wire.port}"):
            build_server(
                InferenceService(wire.backend, reader, metrics),
                host="127.0.0.1",
                port=wire.port,
                max_message_bytes=2**20,
            )


async def test_any_bytes_get_a_typed_answer(tokenizer: Tokenizer) -> None:
    """200 mutated requests: each gets an answer or a refusal, and the server stays up."""
    generator = random.Random(11)
    seeds = [
        request(prompt="abc", sampling={"temperature": 0.7, "top_p": 0.9, "seed": 5}),
        request(messages=[{"role": "user", "content": "hé"}], stopping={"stop": ["x", "yz"]}),
        request(
            model=MODEL, token_ids=PROMPT, stopping={"min_tokens": 2}, speculation={"max_tokens": 3}
        ),
    ]
    codes = []
    async with served(tokenizer, tokenizer.encode("fine")) as wire:
        send = wire.channel.unary_unary(f"/{SERVICE_NAME}/Generate")  # bytes, as they are
        for number in range(200):
            data = bytearray(seeds[number % len(seeds)].SerializeToString())
            for _ in range(generator.randint(1, 6)):
                place = generator.randrange(len(data))
                match generator.randrange(3):
                    case 0:
                        data[place] = generator.randrange(256)
                    case 1:
                        data.insert(place, generator.randrange(256))
                    case _ if len(data) > 1:
                        del data[place]
            codes.append(await send(bytes(data)).code())
        assert (await wire.ask()).text == "fine"
    assert set(codes) == EXPECTED_CODES


async def test_x61_series_exist_at_zero_and_only_rise(tokenizer: Tokenizer) -> None:
    """Before the first request, after one, after more; with a space in the model's name."""
    async with served(tokenizer, tokenizer.encode("abc")) as wire:
        scrapes = [series(wire.gateway_registry)]
        for _ in range(2):
            await wire.ask()
            await failure(wire, token_ids=[299, 300])
            scrapes.append(series(wire.gateway_registry))
        page = render({("gateway", "0"): collect(wire.gateway_registry)}).decode()
    before = scrapes[0]
    for name in (
        "drafthouse_requests_total{outcome=stop}",
        "drafthouse_requests_total{outcome=abort}",
        "drafthouse_requests_total{outcome=refused}",
        "drafthouse_generation_tokens_total",
        "drafthouse_prompt_tokens_total",
        "drafthouse_inter_token_seconds_count",
    ):
        assert before[name] == 0
    for earlier, later in itertools.pairwise(scrapes):
        assert earlier.keys() == later.keys()
        assert all(earlier[name] <= later[name] for name in earlier)
    assert scrapes[-1]["drafthouse_requests_total{outcome=refused}"] == 2
    assert scrapes[-1]["drafthouse_requests_total{outcome=stop}"] == 2
    assert f'model="{MODEL}"' in page
