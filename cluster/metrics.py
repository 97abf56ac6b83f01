"""Prometheus metrics: one registry a process, and one page made of all of them.

Every series exists at zero before the first request, so that a rate over it is never a gap.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.messages import EngineLoad, TokenDelta
from cluster.request import FinishReason

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DRAFTER_FAILURES = ("late", "died", "busy", "none")
DRAFT_LIMITS = ("max_tokens", "target_context", "draft_context", "budget")


class EngineMetrics:
    """What one engine counts. `num_positions` bounds the per-position series."""

    def __init__(self, registry: CollectorRegistry, *, model: str, num_positions: int) -> None:
        labels = {"model": model}

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry).labels(**labels)

        self._num_drafts = counter(
            "drafthouse_spec_decode_num_drafts", "Drafts (of one or more tokens) verified."
        )
        self._num_draft_tokens = counter(
            "drafthouse_spec_decode_num_draft_tokens", "Draft tokens verified."
        )
        self._num_accepted_tokens = counter(
            "drafthouse_spec_decode_num_accepted_tokens", "Draft tokens accepted and emitted."
        )
        per_position = Counter(
            "drafthouse_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted and emitted, by their place in the draft.",
            ("model", "position"),
            registry=registry,
        )
        self._accepted_at = [
            per_position.labels(model=model, position=str(position))
            for position in range(num_positions)
        ]
        self._generated = counter(
            "drafthouse_engine_tokens", "Tokens the engine emitted, accepted drafts included."
        )
        unavailable = Counter(
            "drafthouse_drafter_unavailable",
            "Steps in which the drafter gave nothing, by reason.",
            ("model", "reason"),
            registry=registry,
        )
        self._unavailable = {
            reason: unavailable.labels(model=model, reason=reason) for reason in DRAFTER_FAILURES
        }
        limited = Counter(
            "drafthouse_draft_limited",
            "Times a draft was made shorter than the policy asked, by what limited it.",
            ("model", "reason"),
            registry=registry,
        )
        self._limited = {
            reason: limited.labels(model=model, reason=reason) for reason in DRAFT_LIMITS
        }
        step_seconds = Histogram(
            "drafthouse_step_seconds",
            "Seconds of an engine step, by phase.",
            ("model", "phase"),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._step_seconds = {
            phase: step_seconds.labels(model=model, phase=phase) for phase in ("draft", "target")
        }
        sequences = Gauge(
            "drafthouse_sequences",
            "Sequences held, by state.",
            ("model", "state"),
            registry=registry,
        )
        self._running = sequences.labels(model=model, state="running")
        self._waiting = sequences.labels(model=model, state="waiting")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Observe the seconds the block takes as one `draft` or `target` phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._step_seconds[phase].observe(time.perf_counter() - start)

    def count(self, delta: TokenDelta) -> None:
        """Count what a step brought to one request."""
        self._generated.inc(len(delta.token_ids))
        if delta.num_drafted:
            self._num_drafts.inc()
            self._num_draft_tokens.inc(delta.num_drafted)
            self._num_accepted_tokens.inc(delta.num_accepted)
            for counter in self._accepted_at[: delta.num_accepted]:
                counter.inc()

    def drafter_unavailable(self, reason: str) -> None:
        """Count a step without drafts; `reason` is one of DRAFTER_FAILURES."""
        self._unavailable[reason].inc()

    def draft_limited(self, reason: str) -> None:
        """Count a draft cut short; `reason` is one of DRAFT_LIMITS."""
        self._limited[reason].inc()

    def observe_load(self, load: EngineLoad) -> None:
        """Publish how many sequences run and wait."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)


class GatewayMetrics:
    """What one gateway counts: requests as clients see them."""

    def __init__(self, registry: CollectorRegistry, *, model: str) -> None:
        requests = Counter(
            "drafthouse_requests",
            "Requests ended, by outcome.",
            ("model", "outcome"),
            registry=registry,
        )
        self._requests = {
            outcome: requests.labels(model=model, outcome=outcome)
            for outcome in (*FinishReason, "refused")
        }

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model",), registry=registry).labels(model=model)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(
                name, text, ("model",), buckets=LATENCY_BUCKETS, registry=registry
            ).labels(model=model)

        self._prompt_tokens = counter("drafthouse_prompt_tokens", "Prompt tokens taken in.")
        self._generation_tokens = counter(
            "drafthouse_generation_tokens", "Tokens delivered, as usage says."
        )
        self._first_token = histogram(
            "drafthouse_time_to_first_token_seconds", "Arrival to first token."
        )
        self._inter_token = histogram(
            "drafthouse_inter_token_seconds", "Gap before a chunk over its tokens, once per token."
        )
        self._request_seconds = histogram("drafthouse_request_seconds", "Arrival to last token.")

    def refused(self) -> None:
        """Count a request that was turned away before it began."""
        self._requests["refused"].inc()

    def started(self, *, num_prompt_tokens: int) -> None:
        """Count a request's prompt."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def chunk(self, *, num_tokens: int, gap_seconds: float, first: bool) -> None:
        """Count delivered tokens; `gap_seconds` since the chunk before, or since arrival."""
        self._generation_tokens.inc(num_tokens)
        if first:
            self._first_token.observe(gap_seconds)
            return
        for _ in range(num_tokens):
            self._inter_token.observe(gap_seconds / num_tokens)

    def ended(self, outcome: FinishReason, *, seconds: float) -> None:
        """Count a request's end."""
        self._requests[outcome].inc()
        self._request_seconds.observe(seconds)


class Family(NamedTuple):
    """One metric of one process, light enough to send: (sample name, labels, value)."""

    name: str
    text: str
    kind: str
    samples: tuple[tuple[str, dict[str, str], float], ...]


def collect(registry: CollectorRegistry) -> tuple[Family, ...]:
    """Everything a process has counted so far."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple((sample.name, sample.labels, sample.value) for sample in metric.samples),
        )
        for metric in registry.collect()
    )


def render(processes: Mapping[tuple[str, str], tuple[Family, ...]]) -> bytes:
    """One page in the text format; the keys become the `process` and `replica` labels."""
    registry = CollectorRegistry()
    registry.register(_Merged(processes))
    return generate_latest(registry)


class _Merged(Collector):
    """Joins the families of all processes under one header each."""

    def __init__(self, processes: Mapping[tuple[str, str], tuple[Family, ...]]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for (process, replica), families in self._processes.items():
            for family in families:
                metric = merged.setdefault(
                    family.name, Metric(family.name, family.text, family.kind)
                )
                for name, labels, value in family.samples:
                    metric.add_sample(
                        name, {**labels, "process": process, "replica": replica}, value
                    )
        yield from merged.values()
