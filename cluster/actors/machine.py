"""Several Ray nodes on this machine, each with the resources of one that would stand alone."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, TypeAlias

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.actors.session import APP_NAME, hush
from cluster.actors.starting import started
from cluster.config import GatewayConfig

NodeHandle: TypeAlias = Any  # Ray's own class, without types

NODE_CPUS = 4  # that Ray may count with
STORE_BYTES = 80 * 2**20
PORT_SECONDS = 5.0
SYSTEM = {  # a node that is gone is noticed in about two seconds; without the head others live on
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
    "gcs_rpc_server_reconnect_timeout_s": 600,
}


class Machine:
    """The nodes; started when made, with the head alone."""

    def __init__(self) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": NODE_CPUS,
                "resources": {"head": 1},
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "_system_config": SYSTEM,
            },
        )
        self.address: str = self._cluster.address

    @property
    def head(self) -> NodeHandle:
        """The head node."""
        return self._cluster.head_node

    def add(self, **resources: float) -> NodeHandle:
        """Another node; the caller may be in any thread."""
        # Ray lets a node end with the process by handlers that only the main thread may set;
        # without them `shutdown` ends it.
        self._cluster._shutdown_at_exit = current_thread() is main_thread()  # noqa: SLF001
        add = partial(
            self._cluster.add_node,
            num_cpus=NODE_CPUS,
            resources=resources,
            object_store_memory=STORE_BYTES,
        )
        return started(add)

    def remove(self, node: NodeHandle) -> None:
        """End all processes of a node at once, as when its machine is gone."""
        self._cluster.remove_node(node, allow_graceful=False)

    def end_head(self) -> None:
        """Kill the head's control service and its node manager; nothing brings them back."""
        for name in ("gcs_server", "raylet"):
            for pid in pids(self.head, name):
                os.kill(pid, signal.SIGKILL)

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def pids(node: NodeHandle, name: str) -> list[int]:
    """The node's own processes of that name: raylet, gcs_server."""
    return [info.process.pid for info in node.all_processes.get(name, ())]


@contextmanager
def serving_machine(
    gateway: GatewayConfig, make: Callable[[], Machine] = Machine
) -> Iterator[Machine]:
    """Nodes with Serve on their head, and this process among them.

    Ray prints of every process that dies, where answers of this command go: that is put away.
    """
    hush()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield from _serving(gateway, make)


def _serving(gateway: GatewayConfig, make: Callable[[], Machine]) -> Iterator[Machine]:
    machine = started(make)
    try:
        ray.init(
            address=machine.address,
            log_to_driver=False,
            logging_level="ERROR",
            namespace=APP_NAME,
        )
        hush()
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": gateway.host, "port": gateway.http_port},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        yield machine
    finally:
        ray.shutdown()
        machine.shutdown()


def gateway_ports() -> tuple[int, ...]:
    """The gRPC ports of the gateways that answer now, as a name service would tell."""
    return tuple(port for port in _ask_gateways("grpc_port") if isinstance(port, int))


def num_ready_gateways() -> int:
    """How many gateways take requests now."""
    return sum(answer is True for answer in _ask_gateways("ready"))


def controller_answers() -> bool:
    """Whether Serve's controller does."""
    try:
        return APP_NAME in serve.status().applications
    except (RayError, RayServeException, TimeoutError):
        return False


def _ask_gateways(method: str) -> list[Any]:
    with suppress(TimeoutError, RayError, RayServeException):
        gateways = serve.get_deployment_handle("Gateway", APP_NAME).broadcast(method)
        return list(gateways.results(timeout_s=PORT_SECONDS, return_exceptions=True))
    return []
