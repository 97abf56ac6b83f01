"""The section `autoscaling`: what may come and go by itself, and between which bounds."""

from typing import Self

from pydantic import Field, model_validator

from cluster.config.base import Config


class ReplicaLimits(Config):
    """Between how many, and for how long a change must be wanted before it is made.

    At least one stays: nobody would notice that another is needed.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    upscale_delay_seconds: float = Field(default=10.0, gt=0)
    downscale_delay_seconds: float = Field(default=120.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas: {self.max_replicas} is less than min_replicas {self.min_replicas}"
            )
        return self

    def initial(self, num_replicas: int) -> int:
        """How many there are at first, where so many were asked for."""
        return max(self.min_replicas, min(self.max_replicas, num_replicas))


class TargetAutoscaling(ReplicaLimits):
    """By demand at measured capacity, of which the part `utilization` is planned with.

    No request should be expected to wait longer than `target_delay_seconds`.
    """

    target_delay_seconds: float = Field(default=1.0, gt=0)
    utilization: float = Field(default=0.8, gt=0, le=1)


class DraftAutoscaling(ReplicaLimits):
    """By what one worker more would bring: the part `cost_ratio` of what a target gives.

    That should be what one costs, next to a target.
    """

    cost_ratio: float = Field(default=0.05, gt=0)


class GatewayAutoscaling(ReplicaLimits):
    """By open streams: `target_streams` of a gateway. Each listens on a node of its own."""

    target_streams: float = Field(default=200.0, gt=0)


class AutoscalingConfig(Config):
    """Off where nothing is said: then `num_replicas` of a section holds, else it is the first."""

    target: TargetAutoscaling | None = None
    drafts: DraftAutoscaling | None = None
    gateway: GatewayAutoscaling | None = None
