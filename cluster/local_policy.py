"""The configured policy, with what it has to know of the target."""

from pathlib import Path

from prometheus_client import CollectorRegistry

from cluster.config import DrafthouseConfig
from cluster.control.adaptive import AdaptivePolicy
from cluster.control.cost import CostTable
from cluster.control.metrics import PolicyMetrics
from cluster.control.policy import FixedPolicy, Policy
from cluster.drafters.silent import NoDrafter
from cluster.interfaces import Drafter
from cluster.messages import Rule
from cluster.profiling.steps import Timeable
from cluster.profiling.store import stored_profile


def build_policy(
    config: DrafthouseConfig,
    drafter: Drafter,
    *,
    worker: Timeable,
    folder: Path,
    registry: CollectorRegistry,
) -> Policy:
    """How far to guess. Times the target's steps, for some seconds, if they never were.

    `folder` is the target's model. Without a drafter nothing is ever asked.
    """
    speculation = config.speculation
    metrics = PolicyMetrics(registry, model=config.name)  # there and at zero under any policy
    if isinstance(drafter, NoDrafter):
        return FixedPolicy(0)
    if speculation.policy == "fixed" or not speculation.num_speculative_tokens:
        return FixedPolicy(speculation.num_speculative_tokens)
    if speculation.profile:
        cost = stored_profile(
            worker,
            folder=folder,
            dtype=config.target.dtype,
            max_num_seqs=config.target.max_num_seqs,
            max_num_speculative_tokens=speculation.num_speculative_tokens,
            max_model_len=config.target.max_model_len,
        )
    else:
        cost = CostTable.flat_guess()
    return AdaptivePolicy(
        cost,
        num_speculative_tokens=speculation.num_speculative_tokens,
        trims=Rule(speculation.verification) is Rule.COUPLED,
        metrics=metrics,
    )
