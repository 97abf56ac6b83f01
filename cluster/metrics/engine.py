"""What one engine counts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster.messages import EngineLoad, TokenDelta
from cluster.metrics.series import LATENCY_BUCKETS, ModelSeries

DRAFTER_FAILURES = ("late", "died", "busy", "none", "garbled", "distrusted")
DRAFT_LIMITS = ("max_tokens", "target_context", "draft_context", "budget")
PHASES = ("draft", "target")
SEQUENCE_STATES = ("running", "waiting")


class EngineMetrics:
    """What one engine counts, of drafts by who made them.

    `num_positions` bounds the per-position series. `drafters` are the names that drafts come
    under; any other name is counted as the first.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model: str,
        num_positions: int,
        drafters: Sequence[str] = ("",),
    ) -> None:
        series = ModelSeries(registry, model=model)
        self._drafts = _draft_counts(
            registry, model=model, num_positions=num_positions, drafters=drafters
        )
        self._first_drafter = drafters[0]
        self._generated = series.counter(
            "drafthouse_engine_tokens", "Tokens the engine emitted, accepted drafts included."
        )
        self._late = series.counter(
            "drafthouse_drafts_late",
            "Drafts that were asked for and did not come in time, one a sequence and step.",
        )
        self._unavailable = series.counters(
            "drafthouse_drafter_unavailable",
            "Steps in which the drafter gave nothing, by reason.",
            "reason",
            DRAFTER_FAILURES,
        )
        self._limited = series.counters(
            "drafthouse_draft_limited",
            "Times a draft was made shorter than the policy asked, by what limited it.",
            "reason",
            DRAFT_LIMITS,
        )
        step_seconds = Histogram(
            "drafthouse_step_seconds",
            "Seconds of an engine step, by phase.",
            ("model", "phase"),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._step_seconds = {
            phase: step_seconds.labels(model=model, phase=phase) for phase in PHASES
        }
        self._sequences = series.gauges(
            "drafthouse_sequences", "Sequences held, by state.", "state", SEQUENCE_STATES
        )
        self._places = series.gauge("drafthouse_max_sequences", "Sequences that run at most.")
        self._base_seconds = series.gauge(
            "drafthouse_step_base_seconds", "Of a step's seconds, lately, what rows do not explain."
        )
        self._row_seconds = series.gauge(
            "drafthouse_step_row_seconds", "Seconds that a row adds to a step, lately."
        )
        self._kv_usage = series.gauge(
            "drafthouse_kv_usage_ratio", "KV blocks that sequences use, of all there are."
        )
        self._cache_hits = series.counter(
            "drafthouse_prefix_cache_hit_tokens",
            "Prompt tokens that were not computed: an earlier request's were at hand.",
        )
        self._cache_queried = series.counter(
            "drafthouse_prefix_cache_queried_tokens", "Prompt tokens of all admitted requests."
        )
        self._expired = series.counters(
            "drafthouse_expired_requests",
            "Requests whose deadline passed while they waited, or after they had begun.",
            "state",
            SEQUENCE_STATES,
        )
        self._preemptions = series.counter(
            "drafthouse_preemptions", "Times a running sequence was put back to make room."
        )
        self._queue_seconds = series.seconds(
            "drafthouse_queue_seconds",
            "Seconds from arrival to the first step a request may take part in.",
        )

    def admitted(
        self, *, waited_seconds: float, num_prompt_tokens: int, num_cached_tokens: int
    ) -> None:
        """Count a request that begins, with what of its prompt was at hand."""
        self._queue_seconds.observe(waited_seconds)
        self._cache_queried.inc(num_prompt_tokens)
        self._cache_hits.inc(num_cached_tokens)

    def preempted(self, count: int) -> None:
        """Count sequences that were put back."""
        self._preemptions.inc(count)

    def expired(self, *, had_begun: bool) -> None:
        """Count a request whose deadline passed before its answer was there."""
        self._expired["running" if had_begun else "waiting"].inc()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Observe the seconds the block takes as one `draft` or `target` phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._step_seconds[phase].observe(time.perf_counter() - start)

    def count(self, told: Sequence[tuple[str, TokenDelta]]) -> None:
        """Count what a step brought to requests, each draft under the name it came with."""
        self._generated.inc(sum(len(delta.token_ids) for _, delta in told))
        verified: dict[str, list[TokenDelta]] = {}
        for drafter, delta in told:
            if delta.num_drafted:
                name = drafter if drafter in self._drafts else self._first_drafter
                verified.setdefault(name, []).append(delta)
        for name, deltas in verified.items():
            self._drafts[name].count(deltas)

    def drafts_late(self, count: int) -> None:
        """Count sequences that went on without the draft they were to have."""
        self._late.inc(count)

    def drafter_unavailable(self, reason: str) -> None:
        """Count a step without drafts; `reason` is one of DRAFTER_FAILURES."""
        self._unavailable[reason].inc()

    def draft_limited(self, reason: str) -> None:
        """Count a draft cut short; `reason` is one of DRAFT_LIMITS."""
        self._limited[reason].inc()

    def watch_load(self, load: Callable[[], EngineLoad], *, num_blocks: int) -> None:
        """Publish how many sequences run and wait, how full the KV memory is, what steps cost.

        `load` is asked whenever somebody looks.
        """
        self._sequences["running"].set_function(lambda: load().running)
        self._sequences["waiting"].set_function(lambda: load().waiting)
        self._places.set_function(lambda: load().max_num_seqs)
        self._base_seconds.set_function(lambda: load().base_seconds)
        self._row_seconds.set_function(lambda: load().row_seconds)
        self._kv_usage.set_function(lambda: 1 - load().free_blocks / num_blocks)


class _DraftCounts:
    """The counters of one drafter's drafts."""

    def __init__(
        self, drafts: Counter, drafted: Counter, accepted: Counter, wasted: Counter
    ) -> None:
        self._num_drafts = drafts
        self._num_draft_tokens = drafted
        self._num_accepted_tokens = accepted
        self._num_wasted_tokens = wasted
        self.drafted_at: Sequence[Counter] = ()
        self.accepted_at: Sequence[Counter] = ()

    def count(self, deltas: Sequence[TokenDelta]) -> None:
        """Count verified drafts, each by what came of it."""
        drafted = [delta.num_drafted for delta in deltas]
        accepted = [delta.num_accepted for delta in deltas]
        self._num_drafts.inc(len(deltas))
        self._num_draft_tokens.inc(sum(drafted))
        self._num_accepted_tokens.inc(sum(accepted))
        self._num_wasted_tokens.inc(sum(drafted) - sum(accepted))
        _count_places(self.drafted_at, drafted)
        _count_places(self.accepted_at, accepted)


def _count_places(counters: Sequence[Counter], lengths: Sequence[int]) -> None:
    """Count, for each place, the lengths that reach it."""
    for place, counter in enumerate(counters[: max(lengths)]):
        counter.inc(sum(length > place for length in lengths))


def _draft_counts(
    registry: CollectorRegistry, *, model: str, num_positions: int, drafters: Sequence[str]
) -> dict[str, _DraftCounts]:
    """The counters of every drafter, at zero."""
    series = ModelSeries(registry, model=model)
    families = [
        series.counters(f"drafthouse_spec_decode_num_{name}", text, "drafter", drafters)
        for name, text in (
            ("drafts", "Drafts (of one or more tokens) verified."),
            ("draft_tokens", "Draft tokens verified."),
            ("accepted_tokens", "Draft tokens accepted and emitted."),
            ("wasted_tokens", "Draft tokens verified and not emitted."),
        )
    ]
    counts = {name: _DraftCounts(*(family[name] for family in families)) for name in drafters}
    drafted, accepted = (
        Counter(
            f"drafthouse_spec_decode_num_{name}_tokens_per_pos",
            text,
            ("model", "drafter", "position"),
            registry=registry,
        )
        for name, text in (
            ("draft", "Draft tokens verified, by their place in the draft."),
            ("accepted", "Draft tokens accepted and emitted, by their place in the draft."),
        )
    )
    for name, each in counts.items():
        each.drafted_at, each.accepted_at = (
            [
                family.labels(model=model, drafter=name, position=str(position))
                for position in range(num_positions)
            ]
            for family in (drafted, accepted)
        )
    return counts
