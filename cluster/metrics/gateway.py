"""What one gateway counts: requests as clients see them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster.metrics.series import LATENCY_BUCKETS, Few, ModelSeries
from cluster.request import FinishReason

MAX_TENANTS = 32  # that have series of their own
NO_TENANT = "none"
DELIVERY_BUCKETS = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.032, 0.064, 0.25, 1.0)
OUTCOMES = (*FinishReason, "refused")
KEY_FAILURES = ("missing", "unknown", "expired", "revoked")


class TenantMetrics:
    """What one tenant's requests are counted in."""

    def __init__(self, families: "_Families", **labels: str) -> None:
        self._requests = {
            outcome: families.requests.labels(**labels, outcome=outcome) for outcome in OUTCOMES
        }
        self._prompt_tokens = families.prompt_tokens.labels(**labels)
        self._cached_prompt_tokens = families.cached_prompt_tokens.labels(**labels)
        self._generation_tokens = families.generation_tokens.labels(**labels)
        self._first_token = families.first_token.labels(**labels)
        self._inter_token = families.inter_token.labels(**labels)
        self._request_seconds = families.request_seconds.labels(**labels)

    def refused(self) -> None:
        """Count a request that was turned away before it began."""
        self._requests["refused"].inc()

    def started(self, *, num_prompt_tokens: int) -> None:
        """Count a request's prompt."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def cached(self, num_tokens: int) -> None:
        """Count tokens of a request's prompt that were not computed, as usage says."""
        self._cached_prompt_tokens.inc(num_tokens)

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


class GatewayMetrics:
    """What one gateway counts, by tenant; the first MAX_TENANTS by name, all others together.

    The series of `tenants` exist from the first, as do those of requests without a tenant.
    """

    def __init__(
        self, registry: CollectorRegistry, *, model: str, tenants: Iterable[str] = ()
    ) -> None:
        self._model = model
        self._families = _Families(registry)
        self._few = Few(MAX_TENANTS, unnamed=NO_TENANT)
        self._tenants: dict[str, TenantMetrics] = {}
        series = ModelSeries(registry, model=model)
        self._failovers = series.counter(
            "drafthouse_failovers", "Times a request went on at another engine."
        )
        self._probes = series.counter(
            "drafthouse_losslessness_probes", "Requests that were answered again without drafts."
        )
        self._delivery = series.seconds(
            "drafthouse_delivery_seconds",
            "From an engine's step to its tokens being written, by the two machines' clocks.",
            DELIVERY_BUCKETS,
        )
        self._divergences = series.counter(
            "drafthouse_losslessness_divergences", "Probes whose answer was not the same."
        )
        self._key_failures = series.counters(
            "drafthouse_authentication_failures",
            "Calls that were turned away for their key, by what is wrong with it.",
            "reason",
            KEY_FAILURES,
        )
        for tenant in ("", *tenants):
            self.of(tenant)

    def of(self, tenant: str) -> TenantMetrics:
        """The series that a tenant's requests are counted in."""
        name = self._few.name(tenant)
        if name not in self._tenants:
            self._tenants[name] = TenantMetrics(self._families, model=self._model, tenant=name)
        return self._tenants[name]

    def key_refused(self, reason: str) -> None:
        """Count a call that was turned away for its key; `reason` is one of KEY_FAILURES."""
        self._key_failures[reason].inc()

    def failed_over(self) -> None:
        """Count a request that moved to another engine."""
        self._failovers.inc()

    def delivered(self, *, seconds: float) -> None:
        """Count that a step's tokens were written, so long after the engine had them."""
        self._delivery.observe(max(seconds, 0.0))

    def probed(self, *, diverged: bool) -> None:
        """Count a losslessness probe."""
        self._probes.inc()
        self._divergences.inc(diverged)


class _Families:
    """The metrics that have a label for the tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("model", "tenant")

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*labels, *more), registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, labels, buckets=LATENCY_BUCKETS, registry=registry)

        self.requests = counter("drafthouse_requests", "Requests ended, by outcome.", "outcome")
        self.prompt_tokens = counter("drafthouse_prompt_tokens", "Prompt tokens taken in.")
        self.cached_prompt_tokens = counter(
            "drafthouse_cached_prompt_tokens",
            "Prompt tokens that were not computed, as usage says.",
        )
        self.generation_tokens = counter(
            "drafthouse_generation_tokens", "Tokens delivered, as usage says."
        )
        self.first_token = seconds(
            "drafthouse_time_to_first_token_seconds", "Arrival to first token."
        )
        self.inter_token = seconds(
            "drafthouse_inter_token_seconds", "Gap before a chunk over its tokens, once per token."
        )
        self.request_seconds = seconds("drafthouse_request_seconds", "Arrival to last token.")
