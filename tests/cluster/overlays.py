"""The overlays of k8s/ on one machine: a Ray node for each pod, and the same way to deploy."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray
import trustme
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _disconnect as forget_serve

from cluster.actors import session
from cluster.actors.ports import free_ports
from cluster.actors.starting import started
from cluster.tools.keys import KeyOptions, create_key
from tests.k8s.demand import demands, fitting, groups
from tests.k8s.manifests import Manifests

SERVE_PATH = "/api/serve/applications/"
SERVE = Path(sys.executable).with_name("serve")
STORE_BYTES = 80 * 2**20
DRAIN_SECONDS = 300.0  # more than a stream takes where others are started beside it
HOST = "127.0.0.1"
ROLLED = ("Gateway", "Target", "Draft")  # what a changed configuration is given to
TINY = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 1024}


@dataclass(frozen=True)
class Overlay:
    """An overlay's Serve configuration for this machine, and what its clients show."""

    name: str
    manifests: Manifests
    serve_config: dict[str, Any]
    key: str | None
    authority: bytes | None

    def changed(self, **speculation: object) -> "Overlay":
        """With another section `speculation`, which no token depends on."""
        config = copy.deepcopy(self.serve_config)
        config["applications"][0]["args"]["speculation"] = speculation
        return Overlay(self.name, self.manifests, config, self.key, self.authority)


class Machine:
    """A head without work and with a dashboard, as KubeRay's is; pods come and go beside it."""

    def __init__(self) -> None:
        self.http_port, self._dashboard_port = free_ports(HOST, 2)
        self._cluster = started(
            lambda: Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "object_store_memory": STORE_BYTES,
                    "include_dashboard": True,
                    "dashboard_port": self._dashboard_port,
                },
            )
        )
        self.address = self._cluster.address
        forget_serve()  # of a cluster that is gone, where this process had one
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    def close(self) -> None:
        """End everything."""
        ray.shutdown()
        self._cluster.shutdown()

    @contextmanager
    def pods(self, overlay: Overlay) -> Iterator[None]:
        """A node for each replica of the overlay and, where it has surge, one more for the new one.

        Each has exactly what Ray's autoscaler reads in the manifests for a pod of its group.
        """
        offered = groups(overlay.manifests)
        nodes = []
        scaled = _with_serve_config(overlay)
        for name, demand in demands(scaled).items():
            if name == "Router":  # beside a gateway
                continue
            [group] = fitting(demand, offered)
            resources = {
                key: amount
                for key, amount in offered[group]["resources"].items()
                if key not in {"CPU", "GPU", "memory"}
            }
            for _ in range(demand.most_while_replaced):
                add = partial(
                    self._cluster.add_node,
                    wait=False,
                    num_cpus=offered[group]["resources"]["CPU"],
                    num_gpus=offered[group]["resources"].get("GPU", 0),
                    resources=resources,
                    object_store_memory=STORE_BYTES,
                )
                nodes.append(started(add))
        self._cluster.wait_for_nodes()
        yield
        for node in nodes:
            self._cluster.remove_node(node, allow_graceful=False)

    def deploy(self, overlay: Overlay, folder: Path) -> None:
        """`serve deploy`: the request to the dashboard that KubeRay sends, too."""
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(overlay.serve_config))
        done = subprocess.run(
            [SERVE, "deploy", "--address", self._dashboard, path],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def delete(self) -> None:
        """Take the application away."""
        serve.delete(session.APP_NAME)

    def replicas(self) -> dict[str, dict[str, str]]:
        """By deployment: the state of each replica there is, by its id."""
        return {
            name: {each["replica_id"]: each["state"] for each in deployment["replicas"]}
            for name, deployment in self._application().get("deployments", {}).items()
        }

    def running(self) -> bool:
        """Whether every deployment is as it should be."""
        application = self._application()
        assert application.get("status") != "DEPLOY_FAILED", application
        return bool(application.get("status") == "RUNNING")

    def rolled(self, before: dict[str, dict[str, str]]) -> bool:
        """Whether everything that reads the configuration is new, and nothing old is left."""
        now = self.replicas()
        return self.running() and all(
            now[name]
            and not now[name].keys() & before[name].keys()
            and set(now[name].values()) == {"RUNNING"}
            for name in now
            if name.startswith(ROLLED)
        )

    def _application(self) -> dict[str, Any]:
        answer = httpx.get(f"{self._dashboard}{SERVE_PATH}", timeout=120)
        applications = answer.raise_for_status().json()["applications"]
        return dict(applications.get(session.APP_NAME, {}))

    @property
    def _dashboard(self) -> str:
        return f"http://{HOST}:{self._dashboard_port}"


def scaled_down(
    name: str, manifests: Manifests, *, models: dict[str, Path], http_port: int, folder: Path
) -> Overlay:
    """An overlay with tiny models on CPUs, one replica of each and two gateways at most.

    Structure and resources stay. Gateways take any port: they share one address here.
    """
    config = copy.deepcopy(manifests.serve_config)
    config["proxy_location"] = "HeadOnly"  # every node is this machine
    config["http_options"] = {"host": HOST, "port": http_port}
    args = config["applications"][0]["args"]
    args["target"] |= {"model": str(models["target"]), "num_replicas": 1} | TINY
    for drafter in args["drafter"].get("drafters", ()):
        if drafter["kind"] == "model":
            drafter.update({"model": str(models["draft"]), "num_replicas": 1} | TINY)
    args.pop("autoscaling", None)  # how many there are is not for a test to wait for
    gateway = args["gateway"]
    gateway |= {
        "host": HOST,
        "grpc_port": 0,
        "http_port": http_port,
        "num_replicas": min(2, gateway["num_replicas"]),
        "drain_seconds": DRAIN_SECONDS,
    }
    key = authority = None
    if "keys" in gateway:
        gateway["keys"] = str(folder / "keys.yaml")
        key = create_key(folder / "keys.yaml", "tests", KeyOptions())
    if "tls" in gateway:
        authority, gateway["tls"] = _certificate(folder)
    return Overlay(name, manifests, config, key, authority)


def _certificate(folder: Path) -> tuple[bytes, dict[str, str]]:
    authority = trustme.CA()
    certificate = authority.issue_cert(HOST)
    paths = {"certificate": folder / "tls.crt", "key": folder / "tls.key"}
    certificate.cert_chain_pems[0].write_to_path(paths["certificate"])
    certificate.private_key_pem.write_to_path(paths["key"])
    return authority.cert_pem.bytes(), {name: str(path) for name, path in paths.items()}


def _with_serve_config(overlay: Overlay) -> Manifests:
    objects = copy.deepcopy(overlay.manifests.objects)
    [service] = Manifests(objects).of("RayService")
    service["spec"]["serveConfigV2"] = yaml.safe_dump(overlay.serve_config)
    return Manifests(objects)
