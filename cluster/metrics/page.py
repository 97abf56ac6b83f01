"""One page of metrics, made of what every process has counted."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


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
