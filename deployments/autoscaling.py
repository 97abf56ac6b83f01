"""How Serve is told how many replicas there should be: our own scalers as its policies.

Serve loads this module into its controller by value, and what it imports by name: it must stay
small, and import nothing that the controller would not.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.control.damper import Limits
from cluster.control.demand import TargetLoad
from cluster.control.scaling import DraftingLoad, DraftScaler, GatewayScaler, TargetScaler

REPORT_SECONDS = 1.0
KEPT_SECONDS = 5.0  # of reports; Serve asks for one every fifth of it
STALE_SECONDS = 10.0
OPEN_STREAMS = "open_streams"

L = TypeVar("L", TargetLoad, DraftingLoad)


class TargetPolicy:
    """Of the targets. What it is given is what TargetScaler is."""

    def __init__(self, *, limits: dict[str, Any], **rules: float) -> None:
        self._scaler = TargetScaler(Limits(**limits), **rules)

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas from now on."""
        loads = _loads(ctx, TargetLoad)
        return self._scaler.desired(loads, current=ctx.target_num_replicas, now=_now()), {}


class DraftPolicy:
    """Of one pool of draft workers. What it is given is what DraftScaler is."""

    def __init__(self, *, limits: dict[str, Any], **rules: float) -> None:
        self._scaler = DraftScaler(Limits(**limits), **rules)

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas from now on."""
        loads = _loads(ctx, DraftingLoad)
        return self._scaler.desired(loads, current=ctx.target_num_replicas, now=_now()), {}


class GatewayPolicy:
    """Of the gateways. What it is given is what GatewayScaler is."""

    def __init__(self, *, limits: dict[str, Any], **rules: float) -> None:
        self._scaler = GatewayScaler(Limits(**limits), **rules)

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas from now on."""
        streams = [stats[OPEN_STREAMS] for stats in _reports(ctx, (OPEN_STREAMS,))]
        return self._scaler.desired(streams, current=ctx.target_num_replicas, now=_now()), {}


def autoscaling(policy: type, section: dict[str, Any], *, initial: int) -> AutoscalingConfig:
    """What a deployment is told: this policy with these rules, and nothing of Serve's own.

    All waiting is the policy's. `section` is that of the configuration, as plain data.
    """
    names = {field.name for field in fields(Limits)}
    rules = {name: value for name, value in section.items() if name not in names}
    limits = {name: value for name, value in section.items() if name in names}
    with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
        # Serve names environment variables that are to take its place, and reads none of them.
        return AutoscalingConfig(
            min_replicas=limits["min_replicas"],
            max_replicas=limits["max_replicas"],
            initial_replicas=initial,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=REPORT_SECONDS,
            look_back_period_s=KEPT_SECONDS,
            policy=AutoscalingPolicy(
                policy_function=policy, policy_kwargs=rules | {"limits": limits}
            ),
        )


def _loads(ctx: AutoscalingContext, kind: type[L]) -> list[L]:
    names = tuple(field.name for field in fields(kind))
    return [kind(**stats) for stats in _reports(ctx, names)]


def _reports(ctx: AutoscalingContext, names: Sequence[str]) -> list[dict[str, float]]:
    """The latest of every running replica that said all of these a moment ago."""
    series = ctx.raw_metrics or {}
    oldest = time.time() - STALE_SECONDS
    found = []
    for replica in ctx.running_replicas:
        points = {name: series.get(name, {}).get(replica) for name in names}
        if all(each and each[-1].timestamp >= oldest for each in points.values()):
            found.append({name: each[-1].value for name, each in points.items()})
    return found


def _now() -> float:
    return time.monotonic()
