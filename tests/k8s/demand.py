"""What deployments ask of nodes, and which worker groups have it, by Ray's own reading of both."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticDeprecatedSince20
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr as derive,
)
from ray.serve._private.build_app import build_app as built
from ray.serve.schema import ServeDeploySchema

from deployments.app import build_app
from tests.k8s.manifests import Manifests

GROUPS = {"Gateway": "gateway", "Router": "gateway", "Draft": "draft-cpu", "Target": "target-"}


@dataclass(frozen=True)
class Demand:
    """What the replicas of a deployment ask for: the bundles of each, all on one node."""

    deployment: str
    bundles: tuple[dict[str, float], ...]
    strategy: str
    at_first: int
    at_most: int
    surge: float
    graceful_seconds: float

    @property
    def total(self) -> dict[str, float]:
        """The sum of a replica's bundles."""
        names = {name for bundle in self.bundles for name in bundle}
        return {name: sum(each.get(name, 0.0) for each in self.bundles) for name in names}

    @property
    def most_while_replaced(self) -> int:
        """Replicas there are while a new version takes the old one's place."""
        return self.at_most + int(self.at_most * self.surge)


def demands(manifests: Manifests) -> dict[str, Demand]:
    """By deployment: the Serve configuration as Serve reads it, built as Serve builds it."""
    [application] = ServeDeploySchema.model_validate(manifests.serve_config).applications
    assert application.import_path == f"{build_app.__module__}:{build_app.__qualname__}"
    with warnings.catch_warnings(category=PydanticDeprecatedSince20, action="ignore"):
        app = built(build_app(application.args), name=application.name)
    return {each.name: _demand(each) for each in app.deployments}


def groups(manifests: Manifests) -> dict[str, dict[str, Any]]:
    """What a node of each group has, and how many there may be, as the autoscaler reads it."""
    ray_cluster = {
        "metadata": {"name": "drafthouse", "namespace": "drafthouse"},
        "spec": copy.deepcopy(manifests.cluster),
    }
    types = derive(ray_cluster)["available_node_types"]
    return {"head": types.pop("headgroup")} | types


def fitting(demand: Demand, offered: dict[str, dict[str, Any]]) -> set[str]:
    """The groups of which one node can hold a replica."""
    return {
        name
        for name, group in offered.items()
        if all(amount <= group["resources"].get(what, 0) for what, amount in demand.total.items())
    }


def _demand(deployment: Any) -> Demand:  # noqa: ANN401 - Serve's own class
    config = deployment._deployment_config
    replica = deployment._replica_config
    options = replica.ray_actor_options
    alone = {"CPU": options.get("num_cpus", 0.0), "GPU": options.get("num_gpus", 0.0)}
    alone |= options.get("resources") or {}
    limits = config.autoscaling_config
    first = config.num_replicas if limits is None else limits.min_replicas
    return Demand(
        deployment=deployment.name,
        bundles=tuple(replica.placement_group_bundles or (alone,)),
        strategy=replica.placement_group_strategy or "STRICT_PACK",
        at_first=first,
        at_most=first if limits is None else limits.max_replicas,
        surge=(config.max_surge_percent or 0) / 100,
        graceful_seconds=config.graceful_shutdown_timeout_s,
    )
