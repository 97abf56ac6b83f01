"""The section `observability`."""

from typing import Literal

from pydantic import Field

from cluster.config.base import Config


class ObservabilityConfig(Config):
    """What is told of requests beyond the metrics: ids, counts, times and reasons, never text.

    With an `otlp_endpoint` (`http://host:4317`, OTLP over gRPC; it takes drafthouse[tracing]) each
    request is a span, and `step_sample_ratio` of its steps are spans below it. `log_format` is how
    every process writes its log. `probe_share` of the requests are answered again without drafts
    where engines have room, and a difference is counted and logged.
    """

    otlp_endpoint: str | None = Field(default=None, pattern="^https?://")
    step_sample_ratio: float = Field(default=0.05, ge=0, le=1)
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    probe_share: float = Field(default=0.0, ge=0, le=1)
