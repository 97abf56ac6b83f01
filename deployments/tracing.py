"""Requests as OpenTelemetry spans, each below its caller's; some of its steps are spans below it.

generate   one answer, from its submission to its last token: who asked, how many tokens
  └─ step  a sampled one: its wait, its drafts, the target; K, how many were accepted, why
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.messages import ModelInfo, TokenDelta, TracedStep
from cluster.request import FinishReason, Request
from deployments.backend import Backend
from deployments.trace_context import current_trace

NANOSECONDS = 10**9


class TracedBackend:
    """A backend whose every answer is a span; `step_sample_ratio` of its steps are, too."""

    def __init__(self, backend: Backend, tracer: Tracer, *, step_sample_ratio: float) -> None:
        self._backend = backend
        self._tracer = tracer
        self._step_sample_ratio = step_sample_ratio
        self._propagator = TraceContextTextMapPropagator()

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The backend's own deltas."""
        span = self._begin(request)
        ratio = self._step_sample_ratio if span.is_recording() else 0.0
        answer = self._backend.generate(replace(request, trace_ratio=ratio))
        num_tokens = 0
        try:
            async with aclosing(cast("AsyncGenerator[TokenDelta, None]", answer)) as deltas:
                async for delta in deltas:
                    if delta.token_ids and not num_tokens:
                        span.add_event("first token")
                    num_tokens += len(delta.token_ids)
                    self._tell(span, delta)
                    yield delta
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
            span.end()

    def ready(self) -> bool:
        """As the backend."""
        return self._backend.ready()

    def describe(self) -> ModelInfo:
        """As the backend."""
        return self._backend.describe()

    def _begin(self, request: Request) -> Span:
        return self._tracer.start_span(
            "generate",
            context=self._propagator.extract(dict(current_trace.get())),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.request.model": self._backend.describe().name,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "drafthouse.request_id": request.request_id,
                "drafthouse.tenant": request.tenant,
                "drafthouse.priority": request.priority,
            },
        )

    def _tell(self, span: Span, delta: TokenDelta) -> None:
        """Put what a delta says of steps and of the end into spans."""
        for step in delta.traced_steps:
            self._tell_step(span, step)
        match delta.finish_reason:
            case None:
                return
            case FinishReason.ERROR | FinishReason.FAILED:
                span.set_status(Status(StatusCode.ERROR, delta.finish_reason))
        span.set_attribute("gen_ai.response.finish_reasons", [delta.finish_reason])

    def _tell_step(self, span: Span, step: TracedStep) -> None:
        took = step.draft_seconds + step.verify_seconds
        self._tracer.start_span(
            "step",
            context=set_span_in_context(span),
            start_time=round((step.ended_at - took) * NANOSECONDS),
            attributes={
                "drafthouse.step_id": step.step_id,
                "drafthouse.wait_seconds": step.wait_seconds,
                "drafthouse.draft_seconds": step.draft_seconds,
                "drafthouse.verify_seconds": step.verify_seconds,
                "drafthouse.num_sequences": step.num_sequences,
                "drafthouse.num_asked": step.num_asked,
                "drafthouse.num_speculative_tokens": step.num_drafted,
                "drafthouse.num_accepted": step.num_accepted,
                "drafthouse.drafter": step.drafter,
                "drafthouse.reason": step.reason,
            },
        ).end(round(step.ended_at * NANOSECONDS))


def build_provider(otlp_endpoint: str, *, instance: str) -> TracerProvider:
    """Makes tracers whose spans go to an OTLP collector in the background.

    A collector that is gone costs its spans and nothing else. `shutdown` sends what is left.
    """
    resource = Resource.create({"service.name": "drafthouse", "service.instance.id": instance})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(otlp_endpoint, insecure=otlp_endpoint.startswith("http://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
