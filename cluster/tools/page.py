"""The page of metrics, read as an operator's Prometheus reads it."""

import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SECONDS = 5.0

Labels = tuple[tuple[str, str], ...]


class Page:
    """Every series of one reading: sample name, then its labels, then its value.

    `seconds` is when it was read, on a clock that never goes back. Raises ValueError for another
    text.
    """

    def __init__(self, text: str, *, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._series: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                series = self._series.setdefault(sample.name, {})
                series[labels] = series.get(labels, 0.0) + sample.value

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        return sum(self._values(name, labels))

    def count(self, name: str, **labels: str) -> int:
        """How many series with these labels a metric has."""
        return len(self._values(name, labels))

    def most(self, name: str) -> float:
        """The largest of a metric's series, 0 without any."""
        return max(self._values(name, {}), default=0.0)

    def said(self, name: str, label: str) -> set[str]:
        """What a label of a metric's series says."""
        return {
            dict(labels)[label] for labels in self._series.get(name, {}) if label in dict(labels)
        }

    def buckets(self, name: str) -> dict[float, float]:
        """How many observations of a histogram were at most each bound, all series together."""
        sample = f"{name}_bucket"
        bounds = self.said(sample, "le")
        return {float(bound): self.total(sample, le=bound) for bound in bounds}

    def _values(self, name: str, labels: Mapping[str, str]) -> list[float]:
        return [
            value
            for key, value in self._series.get(name, {}).items()
            if labels.items() <= dict(key).items()
        ]


def read_page(address: str) -> Page:
    """The page now; an empty one while nobody answers. `address` is HOST:PORT."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_SECONDS) as answer:
            return Page(answer.read().decode())
    except (OSError, urllib.error.URLError):
        return Page("")
