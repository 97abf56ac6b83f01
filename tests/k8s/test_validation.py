"""Every object is one that an API server of today would take, and a typo in one is not."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.k8s.kubectl import ROOT, Manifest

CRDS = ROOT.parent / "shared" / "data" / "kuberay"
DEFINED_ELSEWHERE = {  # kinds whose definitions come with what they are for
    "PodMonitor",
    "PrometheusRule",
    "Gateway",
    "GRPCRoute",
    "HTTPRoute",
    "BackendTLSPolicy",
}


def schema_of(definition: Path, version: str) -> dict[str, Any]:
    """The JSON schema in a custom resource definition, closed: a field it does not know is wrong.

    (The API server drops such a field in silence.) Rules in CEL are not applied.
    """
    data = yaml.load(definition.read_text(), Loader=yaml.CSafeLoader)
    [schema] = [
        each["schema"]["openAPIV3Schema"]
        for each in data["spec"]["versions"]
        if each["name"] == version
    ]
    return dict(_closed(schema))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
        result.pop("anyOf", None)
    if "properties" in schema:
        result["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        keeps = schema.get("x-kubernetes-preserve-unknown-fields", False)
        result.setdefault("additionalProperties", bool(keeps))
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = _closed(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = _closed(schema["items"])
    return result


@pytest.fixture(scope="module")
def ray_service() -> jsonschema.Draft7Validator:
    """What holds for a RayService."""
    definition = CRDS / "ray.io_rayservices.yaml"
    if not definition.is_file():
        pytest.skip(f"KubeRay's definitions are not at {CRDS}")
    schema = schema_of(definition, "v1")
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def test_built_in_kinds_are_valid(objects: list[Manifest]) -> None:
    """Against the schemas of the newest Kubernetes, in which an unknown field is an error."""
    version = kubernetes_validate.latest_version()
    kinds = set()
    for each in objects:
        if each["kind"] not in DEFINED_ELSEWHERE | {"RayService"}:
            kubernetes_validate.validate(each, version, strict=True)
            kinds.add(each["kind"])
    assert {"Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"} <= kinds


def test_pods_are_valid(objects: list[Manifest]) -> None:
    """Ray's pods too, against Kubernetes' own schema: KubeRay's may be behind or ahead of it."""
    [service] = [each for each in objects if each["kind"] == "RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod"} | group["template"]
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_a_typo_in_a_pod_is_found(rendered: dict[str, list[Manifest]]) -> None:
    """The check above can fail."""
    [service] = [each for each in rendered["gpu"] if each["kind"] == "RayService"]
    pod = copy.deepcopy(service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"])
    pod["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod"} | pod,
            kubernetes_validate.latest_version(),
            strict=True,
        )


def test_the_ray_service_is_valid(
    objects: list[Manifest], ray_service: jsonschema.Draft7Validator
) -> None:
    """Against KubeRay's own definition."""
    [service] = [each for each in objects if each["kind"] == "RayService"]
    found = [f"{error.json_path}: {error.message}" for error in ray_service.iter_errors(service)]
    assert found == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "serveConfigV3"), ""),
        (("spec", "rayClusterConfig", "autoscalerOptions", "version"), "v3"),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "rayClusterConfig", "gcsFaultToleranceOptions"), {"redisAdress": "redis:6379"}),
        (("spec", "rayClusterDeletionDelaySeconds"), -1),
    ],
)
def test_a_typo_in_the_ray_service_is_found(
    rendered: dict[str, list[Manifest]],
    ray_service: jsonschema.Draft7Validator,
    path: tuple[str, ...],
    value: object,
) -> None:
    """An unknown key, a wrong type, a wrong choice, a wrong range."""
    [service] = [each for each in rendered["gpu"] if each["kind"] == "RayService"]
    service = copy.deepcopy(service)
    part = service
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert not ray_service.is_valid(service)


def test_custom_kinds_are_those_expected(objects: list[Manifest]) -> None:
    """Whatever no schema here is for is of a kind that is known to be so."""
    unknown = [
        each["kind"]
        for each in objects
        if "." in each["apiVersion"].partition("/")[0]
        and not each["apiVersion"].partition("/")[0].endswith(".k8s.io")
        and each["kind"] not in DEFINED_ELSEWHERE | {"RayService"}
    ]
    assert unknown == []
