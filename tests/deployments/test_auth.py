"""Who gets in over gRPC: keys, quotas, and what callers learn when something is wrong."""

import asyncio
import json
import pickle
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from cluster import errors
from cluster.config import GatewayConfig
from cluster.errors import ConfigurationError, DrafthouseError
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools.keys import KeyOptions, create_key, revoke_key
from deployments.auth import Authenticator
from deployments.fair_use import FairUse
from deployments.grpc_service import SERVICE_NAME
from deployments.keys import KeyRing
from deployments.statuses import INTERNAL_DETAILS, public
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.wire import Door, PacedTarget, request, served, until

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
METHODS = ("Generate", "GenerateStream", "Tokenize", "Detokenize", "GetModel")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of keys."""
    return tmp_path / "keys.yaml"


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """Metadata that shows a key."""
    return (("authorization", f"Bearer {key}"),)


async def code_of(call: aio.Call) -> grpc.StatusCode:
    """How a call ends; what a stream still brings is read, or else it never does."""
    if isinstance(call, aio.UnaryStreamCall | aio.StreamStreamCall):
        with suppress(aio.AioRpcError):
            async for _ in call:
                pass
    return await call.code()


async def status_of(call: aio.UnaryUnaryCall[object, object]) -> aio.AioRpcError:
    """How a call fails; it must."""
    with pytest.raises(aio.AioRpcError) as raised:
        await call
    return raised.value


@pytest.mark.wire
async def test_x79_no_key_and_a_bad_key(tokenizer: Tokenizer, path: Path) -> None:
    """UNAUTHENTICATED on every method, whatever its kind; health stays open; a good key opens."""
    key = create_key(path, "acme", KeyOptions())
    revoked = create_key(path, "acme", KeyOptions())
    revoke_key(path, revoked.split("-")[1])
    shown: list[tuple[tuple[str, str | bytes], ...]] = [
        (),
        (("authorization", key),),
        (("authorization", f"Basic {key}"),),
        bearer(""),
        bearer(key + "x"),
        bearer(key[:-1]),
        bearer("x" * 4000),
        bearer(revoked),
        bearer(key) + bearer(key + "x"),
    ]
    async with served(tokenizer, door=Door(Authenticator(KeyRing(path)))) as wire:
        for metadata in shown:
            for name in METHODS:
                kind = "unary_stream" if name == "GenerateStream" else "unary_unary"
                call = getattr(wire.channel, kind)(f"/{SERVICE_NAME}/{name}")
                assert await code_of(call(b"", metadata=metadata)) == UNAUTHENTICATED
        assert wire.backend.requests == []
        reflected = reflection_pb2_grpc.ServerReflectionStub(wire.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        assert await code_of(reflected) == UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(wire.channel)
        await health.Check(health_pb2.HealthCheckRequest())
        await wire.stub.Generate(request(), metadata=bearer(key))
        await wire.stub.GetModel(
            inference_pb2.GetModelRequest(), metadata=(("authorization", f"bearer  {key} "),)
        )
        [sent] = wire.backend.requests
        assert (sent.tenant, sent.cache_salt) == ("acme", "acme")


@pytest.mark.wire
async def test_a_key_opens_its_models_only(tokenizer: Tokenizer, path: Path) -> None:
    """Another tenant's model is not found, as one that is not there."""
    key = create_key(path, "acme", KeyOptions(models=("other",)))
    async with served(tokenizer, door=Door(Authenticator(KeyRing(path)))) as wire:
        for call in (
            wire.stub.Generate(request(), metadata=bearer(key)),
            wire.stub.GetModel(inference_pb2.GetModelRequest(), metadata=bearer(key)),
        ):
            assert await code_of(call) == grpc.StatusCode.NOT_FOUND


@pytest.mark.wire
async def test_keys_rotate_and_are_revoked_under_load(tokenizer: Tokenizer, path: Path) -> None:
    """A key that is there all along is never refused; a revoked one is, and its streams end."""
    steady = create_key(path, "steady", KeyOptions())
    rotating = create_key(path, "rotating", KeyOptions())
    ring = KeyRing(path)
    outcomes: list[grpc.StatusCode] = []
    over = asyncio.Event()

    async with served(tokenizer, [65] * 20, door=Door(Authenticator(ring))) as wire:

        async def load() -> None:
            while not over.is_set():
                call = wire.stub.Generate(request(), metadata=bearer(steady))
                outcomes.append(await call.code())

        loads = [asyncio.create_task(load()) for _ in range(4)]
        for _ in range(8):
            stream = wire.stub.GenerateStream(request(), metadata=bearer(rotating))
            await anext(aiter(stream))
            before, rotating = rotating, create_key(path, "rotating", KeyOptions())
            revoke_key(path, before.split("-")[1])
            assert ring.file.refresh()
            assert (
                await code_of(wire.stub.Generate(request(), metadata=bearer(before)))
                == UNAUTHENTICATED
            )
            await wire.stub.Generate(request(), metadata=bearer(rotating))
            assert await code_of(stream) == grpc.StatusCode.OK
        over.set()
        await asyncio.gather(*loads)
    assert len(outcomes) >= 8
    assert set(outcomes) == {grpc.StatusCode.OK}


@pytest.mark.wire
async def test_a_quota_is_resource_exhausted_with_retry_info(
    tokenizer: Tokenizer, path: Path
) -> None:
    """google.rpc.Status says which limit and when to come back; another tenant is served."""
    key = create_key(path, "acme", KeyOptions(concurrent_requests=1))
    few = create_key(path, "few", KeyOptions(requests_per_minute=1.0))
    door = Door(Authenticator(KeyRing(path)), fair_use=FairUse())
    async with served(tokenizer, [65] * 9, target=PacedTarget, door=door) as wire:
        assert isinstance(wire.target, PacedTarget)
        stream = wire.stub.GenerateStream(request(), metadata=bearer(key))
        await until(lambda: len(wire.backend.requests) == 1)
        error = await status_of(wire.stub.Generate(request(), metadata=bearer(key)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "concurrent requests: the limit of 1 is reached"
        assert retry_seconds(error) == 1.0
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        wire.target.allow(1000)
        await wire.stub.Generate(request(), metadata=bearer(few))
        refused = await status_of(wire.stub.Generate(request(), metadata=bearer(few)))
        assert 50 < retry_seconds(refused) <= 60
        assert await code_of(stream) == grpc.StatusCode.OK
        await wire.stub.Generate(request(), metadata=bearer(key))


@pytest.mark.wire
async def test_a_wrong_field_is_named_in_the_status_too(tokenizer: Tokenizer) -> None:
    """As a violation of google.rpc.BadRequest."""
    async with served(tokenizer) as wire:
        error = await status_of(wire.stub.Generate(request(sampling={"top_p": 7.0})))
    status = rpc_status.from_call(error)
    assert status is not None
    found = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(found)
    assert [violation.field for violation in found.field_violations] == ["sampling.top_p"]


@pytest.mark.wire
async def test_the_deadline_reaches_the_engine(tokenizer: Tokenizer) -> None:
    """What is left of it when the request goes there; without one there is none."""
    async with served(tokenizer) as wire:
        await wire.stub.Generate(request(), timeout=30)
        await wire.stub.Generate(request())
        first, second = wire.backend.requests
    assert first.deadline_seconds is not None
    assert 0 < first.deadline_seconds < 31  # gRPC rounds up what it sends
    assert second.deadline_seconds is None


@pytest.mark.wire
async def test_reflection_can_be_off(tokenizer: Tokenizer) -> None:
    """Then nobody is told what there is."""
    async with served(tokenizer, door=Door(reflects=False)) as wire:
        call = reflection_pb2_grpc.ServerReflectionStub(wire.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        assert await code_of(call) == grpc.StatusCode.UNIMPLEMENTED


def retry_seconds(error: aio.AioRpcError) -> float:
    """What RetryInfo says."""
    status = rpc_status.from_call(error)  # checks that code and message agree
    assert status is not None
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    return info.retry_delay.ToMilliseconds() / 1000


@pytest.mark.wire
@pytest.mark.parametrize("num_bytes", [10**6, 4_200_000, 20_000_000])
async def test_x71_up_to_the_cap_and_not_beyond(tokenizer: Tokenizer, num_bytes: int) -> None:
    """Within it the prompt itself is too long, and named; past it the cap is."""
    cap = 8 * 2**20
    async with served(tokenizer, max_message_bytes=cap) as wire:
        error = await status_of(wire.stub.Generate(request(prompt="a" * num_bytes)))
        if num_bytes < cap:
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith("prompt: ")
        else:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(cap) in error.details()
        await wire.stub.Generate(request())


OVERSIZE: tuple[tuple[dict[str, object], str], ...] = (
    ({"prompt": "a " * 400_000}, "prompt: 800000 characters"),
    ({"messages": [{"role": "user", "content": "a" * 900_000}]}, "messages: 900000 characters"),
    ({"token_ids": [5] * 200_000}, "token_ids"),
    ({"messages": [{"role": "user", "content": "a"}] * 20_000}, "messages"),
    ({"stopping": {"stop": ["a"] * 5000}}, "stopping.stop"),
    ({"stopping": {"stop": ["a" * 100_000]}}, "stopping.stop[0]"),
    ({"stopping": {"stop_token_ids": [1] * 50_000}}, "stopping.stop_token_ids"),
    ({"sampling": {"num_answers": 4_000_000_000}}, "sampling.num_answers"),
    ({"sampling": {"banned_words": ["a"] * 5000}}, "sampling.banned_words"),
    ({"sampling": {"banned_token_ids": [1] * 50_000}}, "sampling.banned_token_ids"),
    ({"sampling": {"allowed_token_ids": [1] * 50_000}}, "sampling.allowed_token_ids"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(50_000), 1.0)}}, "sampling.logit_bias"),
    ({"grammar": {"json_schema": '{"enum": ["' + "a" * 900_000 + '"]}'}}, "grammar.json_schema"),
    ({"grammar": {"regex": "a" * 900_000}}, "grammar.regex"),
    ({"grammar": {"lark": "start: " + '"a" ' * 200_000}}, "grammar.lark"),
    ({"request_id": "a" * 500_000}, "request_id"),
    ({"model": "a" * 500_000}, "model"),
    ({"top_logprobs": 4_000_000_000}, "top_logprobs"),
)


@pytest.mark.wire
async def test_x71_oversize_everything_is_named(tokenizer: Tokenizer) -> None:
    """A typed error that begins with the field, short, and at once for the others."""
    async with served(tokenizer) as wire:
        for fields, field in OVERSIZE:
            error = await status_of(wire.stub.Generate(request(**fields)))
            code = (
                grpc.StatusCode.NOT_FOUND if field == "model" else grpc.StatusCode.INVALID_ARGUMENT
            )
            assert error.code() == code, field
            assert error.details().startswith(field), field
            assert len(error.details()) <= 300
        assert wire.backend.requests == []


@pytest.mark.wire
async def test_a_schema_that_compiles_for_ever_holds_up_nobody(tokenizer: Tokenizer) -> None:
    """It is refused by name after its time; meanwhile others are answered."""
    parts = [{"type": "string", "pattern": f"^.*(a{{{n}}}|b.{{{n}}}).*$"} for n in range(1, 40)]
    async with served(tokenizer, [65] * 3) as wire:
        grammar = {"json_schema": json.dumps({"allOf": parts})}
        dear = asyncio.create_task(status_of(wire.stub.Generate(request(grammar=grammar))))
        while not dear.done():
            await wire.stub.Generate(request())
            await asyncio.sleep(0.01)
        assert len(wire.backend.requests) > 10
        error = await dear
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("grammar.json_schema: takes more than")


def mutated(message: bytes, chance: random.Random) -> bytes:
    """The message with some bytes changed, left out, or put twice."""
    data = bytearray(message)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if data:
                data[at % len(data)] = chance.randrange(256)
            case 1:
                data[at:at] = chance.randbytes(chance.randint(1, 9))
            case 2:
                del data[at : at + chance.randint(1, 9)]
            case _:
                data[at:at] = data[at // 2 : at]
    return bytes(data)


def messages(chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Method and body, of a thousand calls that are hardly ever right."""
    seeds = [
        request(
            prompt="hello",
            sampling={"temperature": 0.5, "logit_bias": {5: 1.0}, "banned_words": ["x"]},
            stopping={"max_tokens": 3, "stop": ["a", "b"]},
            request_id="name",
        ).SerializeToString(),
        request(messages=[{"role": "user", "content": "hi"}]).SerializeToString(),
        request(grammar={"regex": "[ab]+"}, stopping={"max_tokens": 4}).SerializeToString(),
        inference_pb2.DetokenizeRequest(token_ids=[1, 2, 3]).SerializeToString(),
    ]
    for _ in range(1000):
        body = chance.randbytes(chance.randint(0, 200))
        if chance.random() < 0.8:
            body = mutated(chance.choice(seeds), chance)
        yield chance.choice(METHODS), body


@pytest.mark.wire
async def test_a_thousand_malformed_messages(tokenizer: Tokenizer) -> None:
    """Each is answered or refused with a code that is the caller's fault; the server stays up."""
    allowed = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    async with served(tokenizer, [65] * 5) as wire:

        async def send(method: str, body: bytes) -> None:
            kind = "unary_stream" if method == "GenerateStream" else "unary_unary"
            call = getattr(wire.channel, kind)(f"/{SERVICE_NAME}/{method}")(body, timeout=20)
            code = await code_of(call)
            details = await call.details()
            assert code in allowed, (method, body, details)
            assert not leaks(details or ""), details

        calls = list(messages(random.Random(7)))
        for start in range(0, len(calls), 50):
            await asyncio.gather(*(send(*call) for call in calls[start : start + 50]))
        await wire.stub.Generate(request())


def leaks(text: str) -> bool:
    """Whether a text shows what is inside: a stack, a file, an object."""
    return any(sign in text for sign in ("Traceback", 'File "', ".py", "/work", " object at 0x"))


SECRET = "/srv/models/x.py: 'the neighbour said'"  # noqa: S105 - no password
EVERY_ERROR: tuple[DrafthouseError, ...] = (
    errors.DrafthouseError(SECRET),
    errors.InvalidRequest("prompt", "is empty"),
    errors.ContextExceeded(num_prompt_tokens=9, max_model_len=8),
    errors.RequestFailed("no token is left"),
    errors.UnknownModel("other", ("this",)),
    errors.Unauthenticated("expired"),
    errors.ConfigurationError(SECRET),
    errors.UnsupportedArchitecture(SECRET, ("a", "b")),
    errors.UnsupportedFeature(SECRET, SECRET),
    errors.VocabularyMismatch(token_id=1, target_token=SECRET, draft_token=None),
    errors.NotBesideTarget(drafter=SECRET, problem=SECRET),
    errors.MissingExtra(extra=SECRET, purpose=SECRET),
    errors.Unavailable("no target is ready yet"),
    errors.TargetUnavailable("no target is ready"),
    errors.DrafterUnavailable("late"),
    errors.GrammarFailed(SECRET),
    errors.Overloaded(waiting=3, limit=3),
    errors.QuotaExceeded(limit="tokens a minute", allowed=5.0, retry_seconds=2.0),
    errors.DeadlineExceeded("the deadline has passed"),
    errors.OutOfBlocks(needed=2, free=1),
)
CROSS_PROCESSES = (
    errors.InvalidRequest,
    errors.UnknownModel,
    errors.Unauthenticated,
    errors.Unavailable,
    errors.Overloaded,
    errors.QuotaExceeded,
    errors.DeadlineExceeded,
)


def test_every_error_has_a_code_and_none_shows_our_insides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is not of the caller's making is told in one sentence, and in full in the log."""
    classes = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, DrafthouseError)
    }
    assert classes == {type(error) for error in EVERY_ERROR}
    for error in [*EVERY_ERROR, ValueError("/etc/passwd"), KeyError("x"), MemoryError()]:
        caplog.clear()
        code, details = public(error)
        if code is grpc.StatusCode.INTERNAL and not isinstance(error, errors.RequestFailed):
            assert details == INTERNAL_DETAILS
            assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
        else:
            assert details == str(error)
            assert not leaks(details)


def test_errors_are_themselves_in_another_process() -> None:
    """With what they say and when to come back."""
    for error in EVERY_ERROR:
        if isinstance(error, CROSS_PROCESSES):
            copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
            assert (str(copy), copy.retry_seconds) == (str(error), error.retry_seconds)


def test_outside_the_machine_a_gateway_needs_tls_and_keys(tmp_path: Path) -> None:
    """What is missing is named with what to do; loopback and --insecure need nothing."""
    tls = {"certificate": tmp_path / "tls.crt", "key": tmp_path / "tls.key"}
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        config = GatewayConfig(host=host)
        config.check_exposure()
        assert config.reflects
        assert not config.metrics_need_key
    for host in ("0.0.0.0", "::", "10.0.0.1", "gateway.example"):  # noqa: S104 - refused
        with pytest.raises(ConfigurationError, match=r"gateway\.tls: .*gateway\.insecure"):
            GatewayConfig(host=host).check_exposure()
        with pytest.raises(ConfigurationError, match=r"gateway\.keys: .*keys create"):
            GatewayConfig.model_validate({"host": host, "tls": tls}).check_exposure()
        full = GatewayConfig.model_validate({"host": host, "tls": tls, "keys": "keys.yaml"})
        full.check_exposure()
        assert not full.reflects
        assert full.metrics_need_key
        GatewayConfig(host=host, insecure=True).check_exposure()
    with pytest.raises(ConfigurationError, match=r"gateway\.metrics"):
        GatewayConfig(metrics="key").check_exposure()
