"""Each request is a span below its caller's, and some of its steps are spans below it."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from cluster.engine.trace import is_sampled
from cluster.messages import ModelInfo
from cluster.request import SpeculationParams
from deployments.trace_context import HttpTraceContext, current_trace, keep_trace
from deployments.tracing import TracedBackend, build_provider
from tests.fakes import FakeModel, SiblingDrafter
from tests.harness import make_engine, make_fake_target, make_limits, make_request, running
from tests.wire import EngineBackend

INFO = ModelInfo(name="fake", max_model_len=64, vocab_size=32, drafters=("sibling",))
LIMITS = make_limits(max_model_len=64)
TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Traced:
    """A traced engine and its spans so far."""

    def __init__(self, backend: EngineBackend, *, ratio: float) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.backend = TracedBackend(backend, provider.get_tracer("test"), step_sample_ratio=ratio)

    def spans(self, name: str) -> list[ReadableSpan]:
        """Those of that name that have ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@asynccontextmanager
async def traced(*, ratio: float = 1.0) -> AsyncIterator[Traced]:
    """An engine that runs inside the block."""
    engine = make_engine(
        make_fake_target(LIMITS), SiblingDrafter(FakeModel(LIMITS.vocab_size)), limits=LIMITS
    )
    async with running(engine):
        yield Traced(EngineBackend(engine, INFO), ratio=ratio)


async def test_a_request_is_a_span_and_its_steps_are_below_it() -> None:
    """Who asked and how many tokens; of each step what it waited for, K, how many and why."""
    request = make_request((5, 6), max_tokens=24, ignore_eos=True)
    async with traced() as it:
        deltas = [delta async for delta in it.backend.generate(request)]
    [span] = it.spans("generate")
    attributes = dict(span.attributes or {})
    assert attributes["drafthouse.request_id"] == "request"
    assert attributes["gen_ai.usage.input_tokens"] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 24
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert [event.name for event in span.events] == ["first token"]
    steps = it.spans("step")
    assert len(steps) == len(deltas)
    assert all(step.parent and step.parent.span_id == span.context.span_id for step in steps)
    told = [dict(step.attributes or {}) for step in steps]
    for name, expected in (
        ("num_accepted", [delta.num_accepted for delta in deltas]),
        ("num_speculative_tokens", [delta.num_drafted for delta in deltas]),
    ):
        assert [each[f"drafthouse.{name}"] for each in told] == expected
    assert {each["drafthouse.reason"] for each in told} >= {"unasked", "full"}
    for each, step in zip(told, steps, strict=True):
        took = each["drafthouse.draft_seconds"] + each["drafthouse.verify_seconds"]  # type: ignore[operator]
        assert 0 < took == pytest.approx((step.end_time - step.start_time) / 1e9, abs=1e-6)
        assert each["drafthouse.wait_seconds"] >= 0  # type: ignore[operator]


async def test_nothing_is_told_of_steps_that_are_not_sampled() -> None:
    """At a ratio of a tenth the first step and about a tenth of the others; at 0 none at all."""
    for ratio, most in ((0.1, 6), (0.0, 0)):
        async with traced(ratio=ratio) as it:
            request = make_request(
                (5, 6),
                max_tokens=40,
                ignore_eos=True,
                speculation=SpeculationParams(enabled=False),
            )
            deltas = [delta async for delta in it.backend.generate(request)]
        assert sum(len(delta.traced_steps) for delta in deltas) == len(it.spans("step"))
        assert min(most, 4) <= len(it.spans("step")) <= most
        reasons = {dict(step.attributes or {})["drafthouse.reason"] for step in it.spans("step")}
        assert reasons <= {"refused"}


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.05, 0.3, 1.0])
def test_the_share_is_exact_and_evenly_spread(ratio: float) -> None:
    """Of any thousand steps so many, whatever step they begin with."""
    for begin in (1, 338):
        sampled = sum(is_sampled(step, ratio) for step in range(begin, begin + 1000))
        assert abs(sampled - 1000 * ratio) <= 1


async def test_the_span_is_below_the_callers() -> None:
    """A `traceparent` that came with the call makes the request part of that trace."""
    keep_trace([("traceparent", TRACEPARENT), ("authorization", "Bearer secret")])
    async with traced() as it:
        [_ async for _ in it.backend.generate(make_request((5, 6), max_tokens=3))]
    [span] = it.spans("generate")
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
    assert "secret" not in str(span.to_json())


@pytest.mark.parametrize("header", ["", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_traceparent_that_is_none_begins_a_trace(header: str) -> None:
    """What a caller writes there is never an error."""
    keep_trace([("traceparent", header)])
    async with traced() as it:
        [_ async for _ in it.backend.generate(make_request((5, 6), max_tokens=3))]
    assert [span.parent for span in it.spans("generate")] == [None]


async def test_http_brings_its_trace_too() -> None:
    """As header of an HTTP request, and only for that request."""
    seen = []

    async def app(scope: object, receive: object, send: object) -> None:
        del scope, receive, send
        seen.append(dict(current_trace.get()))

    scope = {"type": "http", "headers": [(b"traceparent", TRACEPARENT.encode()), (b"host", b"x")]}
    await HttpTraceContext(app)(scope, None, None)
    await HttpTraceContext(app)({"type": "lifespan"}, None, None)
    assert seen == [{"traceparent": TRACEPARENT}, {}]


async def test_an_answer_that_is_given_up_ends_its_span() -> None:
    """A caller who goes away leaves a span with the tokens so far, and no error."""
    async with traced() as it:
        answer = it.backend.generate(make_request((5, 6), max_tokens=50, ignore_eos=True))
        async for _ in answer:
            break
        await answer.aclose()
    [span] = it.spans("generate")
    assert dict(span.attributes or {})["gen_ai.usage.output_tokens"] == 1
    assert span.status.status_code is StatusCode.UNSET


async def test_a_refused_request_is_an_error_without_its_text() -> None:
    """The kind of the error is told, and nothing it says."""
    async with traced() as it:
        with pytest.raises(Exception, match="tokens"):
            [_ async for _ in it.backend.generate(make_request([7] * 100))]
    [span] = it.spans("generate")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ContextExceeded"
    assert not span.events


def test_a_collector_that_is_gone_does_not_hold_up_the_start() -> None:
    """Spans are sent in the background, to wherever that is."""
    provider = build_provider("http://127.0.0.1:9", instance="gateway-1")
    provider.get_tracer("test")
    assert provider.resource.attributes["service.instance.id"] == "gateway-1"
    provider.shutdown()


@pytest.mark.wire
async def test_spans_reach_a_collector() -> None:
    """Over OTLP as a real collector is told: the service, which gateway, and the whole span."""
    received: list[trace_service_pb2.ExportTraceServiceRequest] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(  # noqa: N802 - the wire's name
            self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
        ) -> trace_service_pb2.ExportTraceServiceResponse:
            del context
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    provider = build_provider(f"http://127.0.0.1:{port}", instance="gateway-1")
    engine = make_engine(
        make_fake_target(LIMITS), SiblingDrafter(FakeModel(LIMITS.vocab_size)), limits=LIMITS
    )
    backend = TracedBackend(
        EngineBackend(engine, INFO), provider.get_tracer("test"), step_sample_ratio=1.0
    )
    async with running(engine):
        [_ async for _ in backend.generate(make_request((5, 6), max_tokens=3))]
    await asyncio.to_thread(provider.shutdown)
    server.stop(None).wait()
    [resource_spans] = [spans for request in received for spans in request.resource_spans]
    told = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
    assert (told["service.name"], told["service.instance.id"]) == ("drafthouse", "gateway-1")
    names = [span.name for scope in resource_spans.scope_spans for span in scope.spans]
    assert names[-1] == "generate"
    assert set(names[:-1]) == {"step"}
