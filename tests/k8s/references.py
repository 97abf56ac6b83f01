"""Where manifests name each other, and what is wrong with it: each check lists its problems."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.k8s.kubectl import ROOT, Manifest
from tests.k8s.manifests import Manifests, values_of

Check = Callable[[Manifests], Iterator[str]]
SECRET_ROW = re.compile(r"^\| (?:ConfigMap )?`([\w-]+)` \| ([^|]+) \|", re.MULTILINE)
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def problems(objects: list[Manifest]) -> list[str]:
    """Everything that is wrong."""
    manifests = Manifests(objects)
    return [problem for check in CHECKS for problem in check(manifests)]


def selectors(manifests: Manifests) -> Iterator[str]:
    """Whoever selects pods finds some."""
    for name, selector in _selectors(manifests):
        if not manifests.selected(selector):
            yield f"{name}: no pod has {selector}"
    for pod in manifests.pods:
        for spread in pod.spec.get("topologySpreadConstraints", []):
            if pod not in manifests.selected(spread["labelSelector"]):
                yield f"{pod.name}: is spread by labels of others"


def ports(manifests: Manifests) -> Iterator[str]:
    """A port that is named is one that the pods have."""
    for who, selector, port in _named_ports(manifests):
        for pod in manifests.selected(selector):
            if port not in (pod.ports if isinstance(port, str) else pod.ports.values()):
                yield f"{who}: {pod.name} has no port {port}"


def routes(manifests: Manifests) -> Iterator[str]:
    """A route leads to a Service's port, from a listener that is there, alone on its host name."""
    listeners = {
        (_name(gateway), listener["name"]): listener["hostname"]
        for gateway in manifests.of("Gateway")
        for listener in gateway["spec"]["listeners"]
    }
    taken: dict[str, str] = {}
    for route in [*manifests.of("GRPCRoute"), *manifests.of("HTTPRoute")]:
        who = f"{route['kind']} {_name(route)}"
        [host] = route["spec"]["hostnames"]
        if taken.setdefault(host, route["kind"]) != route["kind"]:
            yield f"{host}: a GRPCRoute and an HTTPRoute exclude each other"
        for parent in route["spec"]["parentRefs"]:
            if listeners.get((parent["name"], parent["sectionName"])) != host:
                yield f"{who}: no listener {parent} of its host name"


def backends(manifests: Manifests) -> Iterator[str]:
    """What a route or a policy of the edge leads to is a Service's port."""
    services = {
        _name(each): [port["port"] for port in each["spec"]["ports"]]
        for each in manifests.of("Service")
    }
    for kind in ("GRPCRoute", "HTTPRoute"):
        for backend in _backends(manifests.of(kind)):
            if backend["port"] not in services.get(backend["name"], []):
                yield f"{kind}: no Service has {backend}"
    for policy in manifests.of("BackendTLSPolicy"):
        for target in policy["spec"]["targetRefs"]:
            if target["name"] not in services:
                yield f"BackendTLSPolicy {_name(policy)}: no Service {target['name']}"


def config_maps(manifests: Manifests) -> Iterator[str]:
    """A ConfigMap that is read is there, or one of those the README says to bring."""
    there = {_name(each) for each in manifests.of("ConfigMap")} | set(brought())
    for pod in manifests.pods:
        names = [ref["name"] for ref in values_of(pod.spec, "configMapRef")]
        names += [ref["name"] for ref in values_of(pod.spec, "configMap")]
        yield from (f"{pod.name}: no ConfigMap {name}" for name in names if name not in there)
    for policy in manifests.of("BackendTLSPolicy"):
        for ref in policy["spec"]["validation"]["caCertificateRefs"]:
            if ref["name"] not in there:
                yield f"BackendTLSPolicy {_name(policy)}: no ConfigMap {ref['name']}"


def secrets(manifests: Manifests) -> Iterator[str]:
    """A Secret that is read is one of those the README says to bring, with the key that is read."""
    if manifests.of("Secret"):
        yield "a Secret is among the manifests"
    known = brought()
    for name, key in _secrets(manifests):
        if name not in known:
            yield f"the README does not say to bring the Secret {name}"
        elif key is not None and key not in known[name]:
            yield f"the README's Secret {name} has no key {key}"


def files(manifests: Manifests) -> Iterator[str]:
    """A file the configuration or a probe reads is in a Secret that is mounted on its pod."""
    [gateway] = [pod for pod in manifests.ray_pods if pod.name == "gateway"]
    text = f"{manifests.args} {gateway.container}"
    for path in map(Path, sorted(set(re.findall(r"/etc/drafthouse/[\w./-]+\.\w+", text)))):
        volume = gateway.mounts.get(str(path.parent), {})
        if "secret" not in volume:
            yield f"gateway: nothing is mounted for {path}"
        elif path.name not in brought().get(volume["secret"]["secretName"], ()):
            yield f"the README's Secret {volume['secret']['secretName']} has no {path.name}"


def listening(manifests: Manifests) -> Iterator[str]:
    """Where the configuration says to listen is where pods and probes expect it."""
    [gateway] = [pod for pod in manifests.ray_pods if pod.name == "gateway"]
    http = manifests.serve_config["http_options"]
    for pod in manifests.ray_pods:
        if pod.ports["serve"] != http["port"]:
            yield f"{pod.name}: Serve listens on {http['port']}"
    section = manifests.args["gateway"]
    if gateway.ports.get("grpc") != section.get("grpc_port", 50051):
        yield f"gateway: it listens on {section.get('grpc_port')}"
    if section.get("http_port", 8000) != http["port"]:
        yield "gateway.http_port is not Serve's"
    if {section["host"], http["host"]} != {"0.0.0.0"}:  # noqa: S104 - every address of its pod
        yield "nobody outside a pod reaches what listens on loopback"
    probe = gateway.container["readinessProbe"]
    asked = str(probe["grpc"]["port"] if "grpc" in probe else probe["exec"]["command"][3])
    if asked.rpartition(":")[2] != str(gateway.ports.get("grpc")):
        yield "gateway: its readiness is not asked of its gRPC server"
    if ("exec" in probe) != ("tls" in section):
        yield "gateway: its readiness probe and its server disagree about TLS"


def brought() -> dict[str, tuple[str, ...]]:
    """The Secrets (and ConfigMaps) that are not in the manifests, and their keys, by the README."""
    text = (ROOT / "k8s" / "README.md").read_text()
    return {
        name: tuple(re.findall(r"`([\w.-]+)`", keys)) for name, keys in SECRET_ROW.findall(text)
    }


def _secrets(manifests: Manifests) -> Iterator[tuple[str, str | None]]:
    yield manifests.cluster["authOptions"]["secretName"], "auth_token"
    for tree in manifests.objects:
        for ref in values_of(tree, "secretKeyRef"):
            yield ref["name"], ref["key"]
        for volume in values_of(tree, "secret"):
            yield volume["secretName"], None
        for ref in values_of(tree, "credentials"):
            yield ref["name"], ref["key"]
        for refs in values_of(tree, "certificateRefs"):
            for ref in refs:
                yield from ((ref["name"], key) for key in ("tls.crt", "tls.key"))


def _selectors(manifests: Manifests) -> Iterator[tuple[str, Manifest]]:
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        for each in manifests.of(kind):
            yield f"{kind} {_name(each)}", each["spec"]["selector"]
    for each in manifests.of("Service"):
        yield f"Service {_name(each)}", {"matchLabels": each["spec"]["selector"]}
    for each in manifests.of("NetworkPolicy"):
        yield f"NetworkPolicy {_name(each)}", each["spec"]["podSelector"]
        for direction in ("ingress", "egress"):
            for rule in each["spec"].get(direction, []):
                for peer in [*rule.get("from", []), *rule.get("to", [])]:
                    if "podSelector" in peer and "namespaceSelector" not in peer:
                        yield f"NetworkPolicy {_name(each)}", peer["podSelector"]


def _named_ports(manifests: Manifests) -> Iterator[tuple[str, Manifest, str | int]]:
    """Who names a port of which pods."""
    for each in manifests.of("Service"):
        for port in each["spec"]["ports"]:
            selector = {"matchLabels": each["spec"]["selector"]}
            yield f"Service {_name(each)}", selector, port["targetPort"]
    for each in manifests.of("NetworkPolicy"):
        for port in values_of(each["spec"].get("ingress", []), "port"):
            yield f"NetworkPolicy {_name(each)}", each["spec"]["podSelector"], port
    for each in manifests.of("PodMonitor"):
        for endpoint in each["spec"]["podMetricsEndpoints"]:
            yield f"PodMonitor {_name(each)}", each["spec"]["selector"], endpoint["port"]
    for pod in manifests.pods:
        for probe in PROBES:
            for port in values_of(pod.container.get(probe, {}), "port"):
                yield f"{probe} of {pod.name}", {"matchLabels": pod.labels}, port


def _backends(routes: list[Manifest]) -> Iterator[Manifest]:
    for refs in values_of(routes, "backendRefs"):
        yield from refs


def _name(each: Manifest) -> str:
    return str(each["metadata"]["name"])


CHECKS: tuple[Check, ...] = (
    selectors,
    ports,
    routes,
    backends,
    config_maps,
    secrets,
    files,
    listening,
)
