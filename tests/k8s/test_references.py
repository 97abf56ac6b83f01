"""Whatever a manifest names is there; and the checks that say so can fail."""

import copy
from collections.abc import Callable

import pytest

from tests.k8s.kubectl import Manifest
from tests.k8s.manifests import Manifests
from tests.k8s.references import problems

Break = Callable[[Manifests], None]


def test_whatever_is_named_is_there(objects: list[Manifest]) -> None:
    """Selectors, ports, routes, ConfigMaps, Secrets, files and addresses agree across files."""
    assert problems(objects) == []


def group(manifests: Manifests, name: str = "gateway") -> Manifest:
    """A worker group, to be changed."""
    groups = manifests.of("RayService")[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return next(each for each in groups if each["groupName"] == name)


def container(manifests: Manifests) -> Manifest:
    """The gateway's container, to be changed."""
    return group(manifests)["template"]["spec"]["containers"][0]


def named(manifests: Manifests, kind: str, name: str) -> Manifest:
    """One object's specification, to be changed."""
    return next(each["spec"] for each in manifests.of(kind) if each["metadata"]["name"] == name)


def relabel(manifests: Manifests) -> None:
    """Gateways called otherwise."""
    group(manifests)["template"]["metadata"]["labels"]["app.kubernetes.io/component"] = "door"


def rename_port(manifests: Manifests) -> None:
    """The gRPC port called otherwise."""
    container(manifests)["ports"][0]["name"] = "rpc"


def move_port(manifests: Manifests) -> None:
    """The gRPC port elsewhere."""
    container(manifests)["ports"][0]["containerPort"] = 50052


def lose_environment(manifests: Manifests) -> None:
    """The environment called otherwise."""
    container(manifests)["envFrom"][0]["configMapRef"]["name"] = "ray-environment"


def other_token(manifests: Manifests) -> None:
    """A Secret that nobody brings."""
    manifests.of("RayService")[0]["spec"]["rayClusterConfig"]["authOptions"]["secretName"] = "t"


def other_keys(manifests: Manifests) -> None:
    """The keys' Secret called otherwise."""
    volumes = group(manifests)["template"]["spec"]["volumes"]
    next(each for each in volumes if "secret" in each)["secret"]["secretName"] = "keys"


def unmount(manifests: Manifests) -> None:
    """No keys on the gateway."""
    mounts = container(manifests)["volumeMounts"]
    mounts.remove(next(each for each in mounts if each["mountPath"].endswith("keys")))


def plain_probe(manifests: Manifests) -> None:
    """A probe without TLS of a server with it."""
    container(manifests)["readinessProbe"] = {"grpc": {"port": 50051}}


def other_backend(manifests: Manifests) -> None:
    """A route to a port that no Service has."""
    named(manifests, "GRPCRoute", "drafthouse")["rules"][0]["backendRefs"][0]["port"] = 1


def shared_host(manifests: Manifests) -> None:
    """Both kinds of route on one host name."""
    for kind in ("GRPCRoute", "HTTPRoute"):
        named(manifests, kind, "drafthouse")["hostnames"] = ["drafthouse.example.com"]


def loopback(manifests: Manifests) -> None:
    """Serve on loopback."""
    spec = manifests.of("RayService")[0]["spec"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace("0.0.0.0", "127.0.0.1")  # noqa: S104


def lose_redis(manifests: Manifests) -> None:
    """Redis called otherwise in its pod."""
    [redis] = manifests.of("StatefulSet")
    redis["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] = "cache"


BROKEN: tuple[tuple[str, Break, str], ...] = (
    ("local-cpu", relabel, "no pod has"),
    ("local-cpu", rename_port, "Service drafthouse-grpc: gateway has no port grpc"),
    ("local-cpu", rename_port, "NetworkPolicy clients-to-gateways: gateway has no port grpc"),
    ("local-cpu", move_port, "readinessProbe of gateway: gateway has no port 50051"),
    ("local-cpu", lose_environment, "no ConfigMap ray-environment"),
    ("local-cpu", other_token, "does not say to bring the Secret t"),
    ("local-cpu", loopback, "nobody outside a pod"),
    ("gpu", other_keys, "does not say to bring the Secret keys"),
    ("gpu", unmount, "nothing is mounted for /etc/drafthouse/keys/keys.yaml"),
    ("production", plain_probe, "disagree about TLS"),
    ("production", other_backend, "no Service has"),
    ("production", shared_host, "exclude each other"),
    ("production", lose_redis, "Service redis: no pod has"),
)


@pytest.mark.parametrize(
    ("name", "breaking", "expected"), BROKEN, ids=lambda it: getattr(it, "__name__", None)
)
def test_a_broken_reference_is_found(
    rendered: dict[str, list[Manifest]], name: str, breaking: Break, expected: str
) -> None:
    """One name changed on one side only, and the checks above object."""
    objects = copy.deepcopy(rendered[name])
    breaking(Manifests(objects))
    assert any(expected in problem for problem in problems(objects)), problems(objects)
