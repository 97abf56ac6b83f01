"""Times, rights and versions: what several files say of the same thing, they say alike."""

import json
import re
from pathlib import Path

import pytest
import yaml

from cluster.config import load_config, parse_config
from tests.k8s.demand import demands
from tests.k8s.kubectl import OVERLAYS, ROOT, Manifest
from tests.k8s.manifests import Manifests, Pod, values_of

DOCKERFILE = (ROOT / "k8s" / "Dockerfile").read_text()
START_OF_DRAIN_SECONDS = 10.0  # until Serve has seen that a node is to be drained
RESTRICTED_VOLUMES = {"configMap", "emptyDir", "secret", "persistentVolumeClaim", "projected"}


def test_a_pod_waits_as_long_as_its_longest_stream(objects: list[Manifest]) -> None:
    """drain_seconds < Serve's patience < the preStop's < the pod's < the old cluster's."""
    manifests = Manifests(objects)
    config = parse_config(manifests.args)
    patience = max(each.graceful_seconds for each in demands(manifests).values())
    assert config.gateway.drain_seconds < patience
    for pod in manifests.ray_pods:
        command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
        drained = float(command[command.index("--seconds") + 1])
        assert drained >= patience + START_OF_DRAIN_SECONDS, pod.name
        assert pod.spec["terminationGracePeriodSeconds"] >= drained + START_OF_DRAIN_SECONDS
        assert ("--others" in command) == (pod.name == "head")
        assert command[:3] == ["python", "-m", "deployments.drain_node"]
    assert manifests.service["rayClusterDeletionDelaySeconds"] >= patience


def test_upgrades_lose_nobody(objects: list[Manifest]) -> None:
    """A new cluster beside the old; the autoscaler that knows Serve; the head without work."""
    manifests = Manifests(objects)
    assert manifests.service["upgradeStrategy"] == {"type": "NewCluster"}
    assert manifests.cluster["enableInTreeAutoscaling"] is True
    assert manifests.cluster["autoscalerOptions"]["version"] == "v2"
    assert manifests.cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert manifests.cluster["authOptions"]["mode"] == "token"
    assert manifests.serve_config["proxy_location"] == "EveryNode"
    assert all(pod.spec["restartPolicy"] == "Never" for pod in manifests.ray_pods)


def test_a_disruption_leaves_enough_and_can_go_on(objects: list[Manifest]) -> None:
    """Budgets are whole numbers of minAvailable, below how many there are at first."""
    manifests = Manifests(objects)
    for budget in manifests.of("PodDisruptionBudget"):
        assert "maxUnavailable" not in budget["spec"]
        [pod] = manifests.selected(budget["spec"]["selector"])
        at_first = manifests.groups[pod.name]["minReplicas"]
        assert budget["spec"]["minAvailable"] == at_first - 1, pod.name
    budgets = {each["metadata"]["name"] for each in manifests.of("PodDisruptionBudget")}
    assert budgets == set(manifests.groups)


def test_what_a_budget_keeps_is_there_in_production(
    rendered: dict[str, list[Manifest]],
) -> None:
    """No voluntary disruption takes the last of anything; the head's state outlives the head."""
    manifests = Manifests(rendered["production"])
    assert all(each["spec"]["minAvailable"] >= 1 for each in manifests.of("PodDisruptionBudget"))
    address = manifests.cluster["gcsFaultToleranceOptions"]["redisAddress"]
    [redis] = [each for each in manifests.of("Service") if each["metadata"]["name"] == "redis"]
    assert address == f"redis:{redis['spec']['ports'][0]['port']}"


def test_pods_have_the_least_rights(objects: list[Manifest]) -> None:
    """All of Kubernetes' level `restricted`, and a root that nobody can write to."""
    manifests = Manifests(objects)
    [namespace] = manifests.of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {each["metadata"].get("namespace") for each in objects if each is not namespace} == {
        namespace["metadata"]["name"]
    }
    for pod in manifests.pods:
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] > 0
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec.get("automountServiceAccountToken") is (
            None if pod.name == "head" else False  # its autoscaler talks to the API server
        )
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= RESTRICTED_VOLUMES
        assert "/tmp" in pod.mounts  # noqa: S108 - the mount itself
    contexts = [pod.container["securityContext"] for pod in manifests.pods]
    for context in [*contexts, manifests.cluster["autoscalerOptions"]["securityContext"]]:
        assert context == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_pods_of_one_image_agree(objects: list[Manifest]) -> None:
    """Groups are written out one by one: what is common to them is the same in each."""
    head, *workers = Manifests(objects).ray_pods
    for worker in workers:
        assert _common(worker) == _common(head), worker.name
        assert worker.container["startupProbe"] == head.container["startupProbe"]


def test_liveness_is_not_readiness(objects: list[Manifest]) -> None:
    """A gateway without a target is not ready, and lives: nothing restarts it for that."""
    [gateway] = [pod for pod in Manifests(objects).ray_pods if pod.name == "gateway"]
    readiness = gateway.container["readinessProbe"]
    assert "grpc" in readiness or "deployments.grpc_probe" in readiness["exec"]["command"]
    for pod in Manifests(objects).ray_pods:
        path = pod.container["livenessProbe"]["httpGet"]["path"]
        assert path == "/api/local_raylet_healthz"


def test_ray_ports_are_closed(objects: list[Manifest]) -> None:
    """From outside: clients to gateways, the operator and Prometheus to what they need, no more."""
    manifests = Manifests(objects)
    policies = {each["metadata"]["name"]: each["spec"] for each in manifests.of("NetworkPolicy")}
    assert policies.pop("closed") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    inside = policies.pop("ray-inside")
    assert inside["ingress"] == [{"from": [{"podSelector": inside["podSelector"]}]}]
    open_ports = {
        name: {port for rule in spec["ingress"] for port in values_of(rule, "port")}
        for name, spec in policies.items()
        if "ingress" in spec
    }
    open_ports.pop("ray-to-redis", None)
    assert open_ports == {
        "clients-to-gateways": {"grpc", "serve"},
        "operator-to-head": {"dashboard", "serve"},
        "scrape": {"metrics"},
        "scrape-head": {"serve"},
    }
    for spec in policies.values():
        for rule in spec.get("ingress", []):
            assert rule["from"], "an empty list is everyone"
            assert {} not in rule["from"]


def test_outside_sees_the_interface_only(rendered: dict[str, list[Manifest]]) -> None:
    """Neither metrics nor health, nor Ray's own pages, are routed from the edge."""
    [route] = Manifests(rendered["production"]).of("HTTPRoute")
    paths = [match["path"]["value"] for rule in route["spec"]["rules"] for match in rule["matches"]]
    assert paths == ["/v1"]


def test_one_page_of_metrics_is_read_once(objects: list[Manifest]) -> None:
    """The page counts the whole cluster: of two pods that have it, every sum would be double."""
    manifests = Manifests(objects)
    [monitor] = [
        each for each in manifests.of("PodMonitor") if each["metadata"]["name"] == "drafthouse"
    ]
    [pod] = manifests.selected(monitor["spec"]["selector"])
    assert pod.name == "head"
    needs_key = parse_config(manifests.args).gateway.metrics_need_key
    assert ("authorization" in monitor["spec"]["podMetricsEndpoints"][0]) == needs_key


def test_rules_and_dashboard_are_part_of_it(objects: list[Manifest]) -> None:
    """What is alerted on and looked at is installed with what it is about."""
    manifests = Manifests(objects)
    assert manifests.of("PrometheusRule")[0]["spec"]["groups"]
    [dashboard] = [
        each
        for each in manifests.of("ConfigMap")
        if each["metadata"].get("labels", {}).get("grafana_dashboard")
    ]
    assert json.loads(dashboard["data"]["drafthouse.json"])["panels"]


def test_versions_agree(objects: list[Manifest]) -> None:
    """Image tags, the project's version, and Ray's in manifest and image."""
    project = (ROOT / "pyproject.toml").read_text()
    [version] = re.findall(r'^version = "(.+)"', project, re.MULTILINE)
    manifests = Manifests(objects)
    for pod in manifests.ray_pods:
        kind = "cuda" if pod.name == "target-gpu" else "cpu"
        assert pod.container["image"] == f"drafthouse:{version}-{kind}"
    [ray] = re.findall(r"^ray==(\S+)", (ROOT / "k8s" / "constraints.txt").read_text(), re.MULTILINE)
    assert manifests.cluster["rayVersion"] == ray


def test_the_image_is_pinned_and_nobody_is_root() -> None:
    """Every base image has a version and a digest-able tag, and the last word on users is ours."""
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?", DOCKERFILE, re.MULTILINE)
    bases = {base for base, _ in stages} - {name for _, name in stages}
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    for base in bases:
        image = re.sub(r"\$\{(\w+)\}", lambda it: arguments[it.group(1)], base)
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", image), image
    assert len(stages) >= 2
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE)[-1] == "1000:1000"
    assert "VARIANT=cpu" in DOCKERFILE
    assert "cuda" in DOCKERFILE


def test_every_dependency_is_constrained() -> None:
    """What pyproject.toml asks for has one version in the image."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("dependencies = [", 1)[1].split("]\n\n", 1)[0]
    asked = {name.lower() for name in re.findall(r'^    "([\w-]+)', block, re.MULTILINE)}
    pins = (ROOT / "k8s" / "constraints.txt").read_text()
    pinned = {name.lower() for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    assert asked <= pinned


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_configurations_of_the_same_name_agree(overlay: str) -> None:
    """deployments/configs has the same model for `drafthouse serve`, apart from where it runs."""
    names = {"local-cpu": "local"}
    path = ROOT / "deployments" / "configs" / f"{names.get(overlay, overlay)}.yaml"
    there = load_config(path).model_dump(mode="json")
    here = parse_config(_serve_config(overlay)["applications"][0]["args"]).model_dump(mode="json")
    assert there.keys() == here.keys()
    for section in ("name", "speculation"):
        assert there[section] == here[section], section
    assert _without_resources(there["target"]) == _without_resources(here["target"])
    assert _without_resources(there["drafter"]) == _without_resources(here["drafter"])


def _serve_config(overlay: str) -> Manifest:
    path = Path(ROOT / "k8s" / "overlays" / overlay / "serve.yaml")
    return dict(yaml.safe_load(path.read_text()))


def _without_resources(tree: object) -> object:
    """All but what nodes there are, and how many."""
    skipped = {"resources", "engine_resources", "num_replicas"}
    if isinstance(tree, dict):
        return {key: _without_resources(each) for key, each in tree.items() if key not in skipped}
    return [_without_resources(each) for each in tree] if isinstance(tree, list) else tree


def _common(pod: Pod) -> dict[str, object]:
    container = pod.container
    return {
        "pod": pod.spec["securityContext"],
        "environment": container["envFrom"],
        "liveness": container["livenessProbe"],
        "grace": pod.spec["terminationGracePeriodSeconds"],
        "scratch": {path for path in pod.mounts if not path.startswith("/etc/")},
        "ports": {name: pod.ports[name] for name in ("serve", "metrics", "agent")},
    }
