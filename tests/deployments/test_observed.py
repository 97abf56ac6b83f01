"""What a gateway says of its requests beyond metrics: a line for each, and whose trace it is in."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from cluster import logs
from cluster.config import parse_config
from cluster.errors import DrafthouseError
from cluster.logs import current_request_id, setup_logging
from cluster.messages import ModelInfo
from cluster.metrics import GatewayMetrics
from cluster.models.reference import GenerationDefaults
from cluster.request import Request
from cluster.text.tokenizer import load_tokenizer
from deployments import observed as observed_module
from deployments.grpc_service import InferenceService, build_server
from deployments.observed import LoggedBackend, observed
from deployments.probe import ProbedBackend
from deployments.schemas import RequestReader
from deployments.trace_context import current_trace
from protos import inference_pb2, inference_pb2_grpc
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeModel, SiblingDrafter
from tests.harness import make_engine, make_fake_target, make_limits, make_request, running
from tests.wire import EngineBackend

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass(frozen=True)
class Settings:
    """The part of the configuration that logs need."""

    log_format: str = "json"
    log_level: str = "INFO"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Where the log goes meanwhile."""
    loggers = [logging.getLogger(package) for package in logs.PACKAGES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    stream = io.StringIO()
    setup_logging("gateway-1", Settings(), stream=stream)
    yield stream
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def written(lines: io.StringIO) -> list[dict[str, object]]:
    """The objects, one a line."""
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_a_line_is_one_object_with_the_request_it_is_about(lines: io.StringIO) -> None:
    """Whatever a message or an exception holds; lines of others' loggers are not ours."""
    logger = logging.getLogger("deployments.anything")
    token = current_request_id.set("r-1")
    logger.warning('two\nlines and a "quote"', extra={"fields": {"tokens": 3}})
    try:
        int("wrong")
    except ValueError:
        logger.exception("failed %d", 7)
    current_request_id.reset(token)
    logger.debug("too fine")
    logging.getLogger("others").warning("not ours")
    logger.info("about none")
    first, second, third = written(lines)
    assert first["message"] == 'two\nlines and a "quote"'
    assert (first["request_id"], first["tokens"]) == ("r-1", 3)
    assert (first["process"], first["level"]) == ("gateway-1", "WARNING")
    assert (second["message"], second["request_id"]) == ("failed 7", "r-1")
    assert "ValueError: invalid literal" in str(second["exception"])
    assert "request_id" not in third


def test_text_is_one_line_for_people(lines: io.StringIO) -> None:
    """With when, how bad, which process and which logger."""
    setup_logging("router", Settings(log_format="text", log_level="DEBUG"), stream=lines)
    logging.getLogger("cluster.anything").debug("hello %s", "there")
    [line] = lines.getvalue().splitlines()
    assert line.endswith("DEBUG router cluster.anything hello there")


async def test_each_answer_leaves_one_line_and_no_text(lines: io.StringIO) -> None:
    """Who asked, how many tokens, how it ended; the same for one that is refused or given up."""
    limits = make_limits(max_model_len=64)
    engine = make_engine(
        make_fake_target(limits), SiblingDrafter(FakeModel(limits.vocab_size)), limits=limits
    )
    info = ModelInfo(name="fake", max_model_len=64, vocab_size=32, drafters=())
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, model="fake")
    backend = LoggedBackend(EngineBackend(engine, info), metrics)

    async def answer(request: Request, most: int) -> None:
        deltas = backend.generate(request)
        with suppress(DrafthouseError):
            async for _ in deltas:
                if (most := most - 1) == 0:
                    break
        await deltas.aclose()

    async with running(engine):
        await answer(make_request((1,), request_id="whole", max_tokens=9, ignore_eos=True), 99)
        await answer(make_request((1,), request_id="closed", max_tokens=50, ignore_eos=True), 1)
        await answer(make_request([1] * 70, request_id="refused"), 99)
    told = {line["request_id"]: line for line in written(lines)}
    assert [told[name]["ended"] for name in ("whole", "closed", "refused")] == [
        "length",
        "closed",
        "ContextExceeded",
    ]
    assert [told[name]["completion_tokens"] for name in ("whole", "closed", "refused")] == [9, 1, 0]
    assert told["whole"]["prompt_tokens"] == 1
    delivered = registry.get_sample_value("drafthouse_delivery_seconds_sum", {"model": "fake"})
    assert delivered is not None
    assert 0 < delivered < 60


@pytest.mark.wire
async def test_a_grpc_calls_trace_and_request_reach_whoever_answers(tmp_path: Path) -> None:
    """Of two calls each has its own: `traceparent` of its metadata, its own request id."""
    seen: list[tuple[str, dict[str, str]]] = []
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer", vocab_size=300))
    limits = make_limits(vocab_size=tokenizer.num_tokens)
    engine = make_engine(
        make_fake_target(limits), SiblingDrafter(FakeModel(limits.vocab_size)), limits=limits
    )

    class Watching(EngineBackend):
        def generate(self, request: Request):  # type: ignore[no-untyped-def]  # noqa: ANN202
            seen.append((current_request_id.get(), dict(current_trace.get())))
            return super().generate(request)

    info = ModelInfo(
        name="fake", max_model_len=256, vocab_size=limits.vocab_size, drafters=("sibling",)
    )
    reader = RequestReader(info, tokenizer, GenerationDefaults(eos_token_ids=frozenset({2})))
    metrics = GatewayMetrics(CollectorRegistry(), model="fake")
    service = InferenceService(LoggedBackend(Watching(engine, info), metrics), reader, metrics)
    async with running(engine):
        server, port = build_server(service, host="127.0.0.1", port=0, max_message_bytes=2**20)
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for name, metadata in (("a", (("traceparent", TRACEPARENT),)), ("b", ())):
                message = inference_pb2.GenerateRequest(
                    token_ids=(5, 6),
                    request_id=name,
                    stopping=inference_pb2.Stopping(max_tokens=3),
                )
                await stub.Generate(message, metadata=metadata)
        await server.stop(None)
    assert [trace for _, trace in seen] == [{"traceparent": TRACEPARENT}, {}]
    assert [name.split("-")[0] for name, _ in seen] == ["a", "b"]


async def test_what_is_configured_is_around_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes while an engine has half its places free; all of it ends with the gateway."""
    config = parse_config({"observability": {"probe_share": 0.5}})
    load: int | None = None
    made: list[ProbedBackend] = []
    monkeypatch.setattr(
        observed_module,
        "ProbedBackend",
        lambda *args, **kwargs: made.append(ProbedBackend(*args, **kwargs)) or made[-1],
    )
    metrics = GatewayMetrics(CollectorRegistry(), model="fake")
    async with AsyncExitStack() as closing:
        backend = SimpleNamespace(ready=lambda: True, describe=lambda: "info")
        whole = observed(
            backend,  # type: ignore[arg-type]  # only asked what it is
            config,
            metrics,
            instance="gateway-1",
            lowest_load=lambda: load,
            closing=closing,
        )
        assert (whole.ready(), whole.describe()) == (True, "info")
        [probed] = made
        assert not probed._has_room()
        load = config.target.max_num_seqs // 2
        assert probed._has_room()
        load += 1
        assert not probed._has_room()
        assert not probed._probing.done()
    with suppress(BaseException):
        await probed._probing
    assert probed._probing.cancelled()
