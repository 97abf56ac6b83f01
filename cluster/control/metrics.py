"""What the policy counts, all of it at zero before the first step."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from cluster.control.regime import Reason
from cluster.metrics import ModelSeries

STATES = ("drafting", *Reason)


class PolicyMetrics:
    """How far was guessed, and why no further."""

    def __init__(self, registry: CollectorRegistry, *, model: str) -> None:
        series = ModelSeries(registry, model=model)
        self._asked = series.counter("drafthouse_policy_asked_tokens", "Draft tokens asked for.")
        self._offered = series.counter(
            "drafthouse_policy_offered_tokens", "Draft tokens that came."
        )
        self._admitted = series.counter(
            "drafthouse_policy_admitted_tokens", "Draft tokens let through."
        )
        self._probes = series.counter(
            "drafthouse_policy_probes", "Sequences drafted for only to see whether it pays now."
        )
        self._price = series.gauge(
            "drafthouse_spec_price", "The survival below which a draft position does not pay."
        )
        self._goodput = series.gauge(
            "drafthouse_goodput_tokens_per_second", "Tokens a second that the policy expects."
        )
        self._drift = series.gauge(
            "drafthouse_step_cost_drift",
            "Seconds of a step now over those of the start-up profile.",
        )
        self._draft_seconds = series.gauge(
            "drafthouse_policy_draft_seconds", "Seconds that a step is expected to wait for drafts."
        )
        self._calibration_error = series.gauge(
            "drafthouse_calibration_error",
            "Mean distance of predicted from observed survival of verified draft positions.",
        )
        self._regime = series.gauges(
            "drafthouse_policy_regime",
            "1 for what holds now: drafting, or why it does not pay.",
            "state",
            STATES,
        )
        self._state = ""
        changes = Counter(
            "drafthouse_policy_changes",
            "Times drafting as a whole was begun or given up, by what decided it.",
            ("model", "to", "reason"),
            registry=registry,
        )
        self._changes = {
            (to, reason): changes.labels(model=model, to=to, reason=reason)
            for to in ("drafting", "plain")
            for reason in Reason
        }

    def watch(
        self,
        *,
        price: Callable[[], float],
        goodput: Callable[[], float],
        drift: Callable[[], float],
        draft_seconds: Callable[[], float],
        calibration_error: Callable[[], float],
    ) -> None:
        """Publish what these say whenever somebody looks."""
        self._price.set_function(price)
        self._goodput.set_function(goodput)
        self._drift.set_function(drift)
        self._draft_seconds.set_function(draft_seconds)
        self._calibration_error.set_function(calibration_error)

    def chosen(self, *, num_asked: int, num_probes: int) -> None:
        """Count what was asked for."""
        self._asked.inc(num_asked)
        if num_probes:
            self._probes.inc(num_probes)

    def admitted(self, *, num_offered: int, num_admitted: int) -> None:
        """Count what came of it."""
        self._offered.inc(num_offered)
        self._admitted.inc(num_admitted)

    def regime(self, state: str) -> None:
        """Publish what holds: one of STATES."""
        if state != self._state:
            for name, gauge in self._regime.items():
                gauge.set(name == state)
            self._state = state

    def changed(self, *, drafting: bool, reason: Reason) -> None:
        """Count a change of regime."""
        self._changes["drafting" if drafting else "plain", reason].inc()
