"""A cluster of four Ray nodes on this machine, and the application on it.

head      Serve's controller, the HTTP proxy and the router
target    twice: room for two engines each, so that a replacement or an update finds a place
edge      the gateway and the draft worker
"""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.actors.machine import Machine, NodeHandle, serving_machine
from cluster.config import DrafthouseConfig
from tests.cluster.harness import make_config, worker_drafter


class Nodes:
    """The nodes, by what they are for."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.edge = machine.add(edge=2)
        self.targets = [self.add_target(), self.add_target()]

    @property
    def head(self) -> NodeHandle:
        """The head node."""
        return self._machine.head

    def add_target(self) -> NodeHandle:
        """Another node for targets."""
        return self._machine.add(target=2)

    def remove(self, node: NodeHandle) -> None:
        """End all processes of a node at once, as when its machine is gone."""
        self._machine.remove(node)

    def end_head(self) -> None:
        """Kill the head's control service and its node manager."""
        self._machine.end_head()


@contextmanager
def nodes(config: DrafthouseConfig) -> Iterator[Nodes]:
    """The cluster with Serve on its head, and this process in it."""
    with serving_machine(config.gateway) as machine:
        yield Nodes(machine)


def spread_config(folder: object, **target: object) -> DrafthouseConfig:
    """Two engines, a draft worker and a gateway, each where the nodes have a place for it."""
    base = make_config(folder)
    drafter = worker_drafter(folder) | {"resources": {"CPU": 0.1, "edge": 0.5}}
    return base.model_validate(
        base.model_dump()
        | {
            "drafter": drafter,
            "router": {"resources": {"CPU": 0.1, "head": 0.5}},
            "target": base.target.model_dump()
            | {"num_replicas": 2, "max_num_seqs": 8, "max_num_waiting": 8}
            | {"resources": {"CPU": 0.5, "target": 1}}
            | target,
            "gateway": base.gateway.model_dump()
            | {"resources": {"CPU": 0.1, "edge": 0.5}, "drain_seconds": 60.0},
        }
    )
