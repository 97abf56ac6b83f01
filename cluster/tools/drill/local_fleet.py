"""The cluster under drill on nodes of this machine."""

import time

from cluster.actors import machine, session
from cluster.actors.machine import Machine, NodeHandle
from cluster.config import DrafthouseConfig
from cluster.tools.drill.faults import Census, Fault, Harm, Part
from cluster.tools.drill.layout import Layout, num_draft_supervisors, num_draft_workers
from cluster.tools.drill.processes import (
    Measure,
    found,
    harm,
    has_ancestor,
    is_stopped,
    measured,
    resume,
)
from cluster.tools.page import Page, read_page

PAUSE_SECONDS = 5.0
POLL_SECONDS = 0.25


class LocalFleet:
    """Nodes of this machine."""

    def __init__(self, machine: Machine, config: DrafthouseConfig, layout: Layout) -> None:
        self._machine = machine
        self._config = config
        self._layout = layout
        self._targets = [machine.add(**layout.target) for _ in range(layout.num_targets)]
        self._edges = [machine.add(**layout.edge) for _ in range(layout.num_edges)]
        num_targets, ranks = config.target.num_replicas, config.target.tensor_parallel_size
        self._whole = {
            Part.ENGINE: num_targets,
            Part.RANK: num_targets * ranks if ranks > 1 else 0,
            Part.TARGET: num_targets,
            Part.DRAFT: num_draft_workers(config),
            Part.KEEPER: num_draft_supervisors(config),
            Part.GATEWAY: config.gateway.num_replicas,
            Part.ROUTER: 1,
            Part.CONTROLLER: 1,
        }
        self.num_seqs = config.target.max_num_seqs  # of each engine
        self.host = config.gateway.host
        self.http = f"{self.host}:{config.gateway.http_port}"

    def deploy(self) -> None:
        """Put the application on the nodes; returns when it is whole."""
        session.await_ready(session.deploy(self._config), progress=lambda _: None)
        while self.missing() is not None:
            time.sleep(POLL_SECONDS)

    def page(self) -> Page:
        """The metrics now."""
        return read_page(self.http)

    def addresses(self) -> tuple[str, ...]:
        """Where the gateways that answer listen for gRPC."""
        return tuple(f"{self.host}:{port}" for port in machine.gateway_ports())

    def measured(self) -> list[Measure]:
        """Memory and descriptors of every process."""
        return measured()

    def census(self) -> Census:
        """How many there are of each part."""
        nodes = {
            Part.CONTROL_SERVICE: 1,
            Part.TARGET_NODE: len(self._nodes_with_engines()),
            Part.EDGE_NODE: len(self._edges),
            Part.HEAD_NODE: 1,
        }
        return {part: len(each) for part, each in found().items()} | nodes

    def inject(self, fault: Fault, victim: int) -> None:
        """Do it, to that one of its part; a pause is over when this returns."""
        match fault.part:
            case Part.TARGET_NODE:
                self._replace(self._targets, self._nodes_with_engines()[victim], "target")
            case Part.EDGE_NODE:
                self._replace(self._edges, self._edges[victim], "edge")
            case Part.HEAD_NODE:
                self._machine.end_head()
            case Part.CONTROL_SERVICE:
                [pid] = machine.pids(self._machine.head, "gcs_server")
                self._harm(pid, fault.harm)
            case part:
                self._harm(found()[part][victim].pid, fault.harm)

    def missing(self) -> str | None:
        """What is not as it was in the beginning; None when the cluster is whole."""
        for part, processes in found().items():
            if len(processes) != self._whole[part]:
                return f"{len(processes)} of {self._whole[part]}: {part}"
            if any(map(is_stopped, processes)):
                return f"stopped: {part}"
        if not machine.controller_answers():
            return "the controller does not answer"
        page = self.page()
        for kind, part in (("target", Part.ENGINE), ("draft", Part.DRAFT)):
            known = page.total("drafthouse_members", kind=kind)
            if known != self._whole[part]:
                return f"{known:g} of {self._whole[part]} {kind}s registered"
        if machine.num_ready_gateways() != self._whole[Part.GATEWAY]:
            return "a gateway is not ready"
        return None

    def _harm(self, pid: int, how: Harm) -> None:
        harm(pid, how)
        if how is Harm.PAUSE:
            time.sleep(PAUSE_SECONDS)
            resume(pid)

    def _replace(self, nodes: list[NodeHandle], lost: NodeHandle, kind: str) -> None:
        """Remove a node, and have a new one join, as whoever provides machines would."""
        nodes.remove(lost)
        self._machine.remove(lost)
        offer = self._layout.target if kind == "target" else self._layout.edge
        nodes.append(self._machine.add(**offer))

    def _nodes_with_engines(self) -> list[NodeHandle]:
        engines = found()[Part.ENGINE]
        return [
            node
            for node in self._targets
            if any(has_ancestor(each, set(machine.pids(node, "raylet"))) for each in engines)
        ]
