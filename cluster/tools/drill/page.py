"""The page of metrics, read as an operator's Prometheus reads it."""

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SECONDS = 5.0

Labels = tuple[tuple[str, str], ...]


class Page:
    """Every series of one reading: sample name, then its labels, then its value."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                self._series.setdefault(sample.name, {})[labels] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        return sum(
            value
            for key, value in self._series.get(name, {}).items()
            if labels.items() <= dict(key).items()
        )

    def most(self, name: str) -> float:
        """The largest of a metric's series, 0 without any."""
        return max(self._series.get(name, {}).values(), default=0.0)


def read_page(address: str) -> Page:
    """The page now; an empty one while nobody answers. `address` is HOST:PORT."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_SECONDS) as answer:
            return Page(answer.read().decode())
    except (OSError, urllib.error.URLError):
        return Page("")
