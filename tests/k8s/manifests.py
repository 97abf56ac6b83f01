"""A set of Kubernetes objects, and the pods that come of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from tests.k8s.kubectl import Manifest

RAY_GROUP_KEY = "groupName"


@dataclass(frozen=True)
class Pod:
    """A pod as a template describes it."""

    name: str
    template: Manifest

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Manifest:
        """Its specification."""
        return dict(self.template["spec"])

    @property
    def container(self) -> Manifest:
        """Its one container."""
        [container] = self.spec["containers"]
        return dict(container)

    @cached_property
    def ports(self) -> dict[str, int]:
        """Its ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @cached_property
    def mounts(self) -> dict[str, Manifest]:
        """The volume behind each path that is mounted."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        claims = {"data": {"name": "data"}} if "data" not in volumes else {}
        return {
            mount["mountPath"]: (volumes | claims)[mount["name"]]
            for mount in self.container["volumeMounts"]
        }


class Manifests:
    """One overlay's objects."""

    def __init__(self, objects: list[Manifest]) -> None:
        self.objects = objects

    def of(self, kind: str) -> list[Manifest]:
        """All objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    @property
    def service(self) -> Manifest:
        """The RayService's specification."""
        [service] = self.of("RayService")
        return dict(service["spec"])

    @property
    def cluster(self) -> Manifest:
        """The RayCluster's."""
        return dict(self.service["rayClusterConfig"])

    @property
    def groups(self) -> dict[str, Manifest]:
        """The worker groups by name."""
        return {group[RAY_GROUP_KEY]: group for group in self.cluster["workerGroupSpecs"]}

    @property
    def serve_config(self) -> Manifest:
        """What Serve is told."""
        return dict(yaml.safe_load(self.service["serveConfigV2"]))

    @property
    def args(self) -> Manifest:
        """The configuration in it."""
        [application] = self.serve_config["applications"]
        return dict(application["args"])

    @property
    def ray_pods(self) -> list[Pod]:
        """The head, and a worker of each group."""
        head = Pod("head", self.cluster["headGroupSpec"]["template"])
        workers = [Pod(name, group["template"]) for name, group in self.groups.items()]
        return [head, *workers]

    @property
    def pods(self) -> list[Pod]:
        """Every kind of pod there is."""
        others = [
            Pod(each["metadata"]["name"], each["spec"]["template"])
            for each in self.of("StatefulSet")
        ]
        return [*self.ray_pods, *others]

    def selected(self, selector: Manifest) -> list[Pod]:
        """The pods a label selector finds."""
        wanted = selector.get("matchLabels", {})
        return [pod for pod in self.pods if wanted.items() <= pod.labels.items()]


def values_of(tree: Any, key: str) -> Iterator[Any]:  # noqa: ANN401 - any part of a manifest
    """Everything that stands under a key, however deep."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from values_of(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from values_of(value, key)
