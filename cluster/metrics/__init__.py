"""Prometheus metrics: one registry a process, and one page made of all of them.

Every series exists at zero before the first request, so that a rate over it is never a gap.
"""

from cluster.metrics.engine import DRAFT_LIMITS, DRAFTER_FAILURES, EngineMetrics
from cluster.metrics.gateway import GatewayMetrics
from cluster.metrics.page import Family, collect, render
from cluster.metrics.series import LATENCY_BUCKETS, ModelSeries

__all__ = [
    "DRAFTER_FAILURES",
    "DRAFT_LIMITS",
    "LATENCY_BUCKETS",
    "EngineMetrics",
    "Family",
    "GatewayMetrics",
    "ModelSeries",
    "collect",
    "render",
]
