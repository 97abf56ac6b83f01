"""Series of one model, and a label whose values are few."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

Value = TypeVar("Value", bound=str)


class ModelSeries:
    """Makes series of one model in a registry, each at zero from the first."""

    def __init__(self, registry: CollectorRegistry, *, model: str, **labels: str) -> None:
        self._registry = registry
        self._labels = {"model": model, **labels}

    def counter(self, name: str, text: str) -> Counter:
        """A counter; its name ends in `_total` on the page."""
        return Counter(name, text, self._labels, registry=self._registry).labels(**self._labels)

    def gauge(self, name: str, text: str) -> Gauge:
        """A gauge."""
        return Gauge(name, text, self._labels, registry=self._registry).labels(**self._labels)

    def seconds(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        """A histogram of seconds."""
        return Histogram(name, text, self._labels, buckets=buckets, registry=self._registry).labels(
            **self._labels
        )

    def counters(
        self, name: str, text: str, label: str, values: Iterable[Value]
    ) -> Mapping[Value, Counter]:
        """A counter for each value of a further label."""
        family = Counter(name, text, (*self._labels, label), registry=self._registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def gauges(
        self, name: str, text: str, label: str, values: Iterable[Value]
    ) -> Mapping[Value, Gauge]:
        """A gauge for each value of a further label."""
        family = Gauge(name, text, (*self._labels, label), registry=self._registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}


class Few:
    """Keeps a label's values few: the first `most` are called by their names, the rest `other`.

    What a value was called once it is called for ever, so that no series ever falls.
    """

    OTHER = "other"

    def __init__(self, most: int, *, unnamed: str) -> None:
        self._most = most
        self._unnamed = unnamed  # what the empty value is called
        self._named: set[str] = {unnamed}

    def name(self, value: str) -> str:
        """What a value is called on the page."""
        value = value or self._unnamed
        if value not in self._named:
            if len(self._named) > self._most:
                return self.OTHER
            self._named.add(value)
        return value
