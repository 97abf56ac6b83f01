"""What a pod of a Ray cluster does before it ends: `python -m deployments.drain_node`.

Its node is drained: Serve starts replacements of the node's replicas elsewhere, then lets those
here end as they do, with their streams. A pod that just ended would cut them all off.
"""

import argparse
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import RpcError
from ray.util import get_node_ip_address

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
RPC_SECONDS = 5.0
NOTICE_SECONDS = 5.0  # within so long the other pods of a cluster that goes have said so


class Nodes(Protocol):
    """What is asked of Ray's global state."""

    def get_all_node_info(self, *, timeout: float) -> dict[Any, Any]:
        """Every node there is or was, by id."""
        ...

    def get_draining_nodes(self, *, timeout: float) -> dict[str, int]:
        """The deadlines of nodes that are being drained, by id in hexadecimal."""
        ...

    def drain_node(
        self, node_id: str, reason: int, reason_message: str, deadline_timestamp_ms: int
    ) -> tuple[bool, str]:
        """Whether it will be done, and why not."""
        ...


class Clock(Protocol):
    """Time as it passes here."""

    def time(self) -> float:
        """Seconds since the epoch."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Come back later."""
        ...


def drain(nodes: Nodes, node_id: str, *, seconds: float, clock: Clock) -> bool:
    """Drain a node; return whether it was empty before the seconds were over.

    Ray ends a drained node that does nothing any more by itself.
    """
    deadline = clock.time() + seconds
    accepted, problem = nodes.drain_node(
        node_id,
        # The node goes whatever happens: an idle one would be refused nothing, a busy one would.
        DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "its pod ends",
        round(deadline * 1000),
    )
    if not accepted:
        logger.error("node %s is not drained: %s", node_id, problem)
        return False
    return _until(lambda: node_id not in alive(nodes), deadline, clock)


def wait_for_others(nodes: Nodes, node_id: str, *, seconds: float, clock: Clock) -> bool:
    """Return whether every other node that is being drained was, before the seconds were over."""
    deadline = clock.time() + seconds
    clock.sleep(min(NOTICE_SECONDS, seconds))
    return _until(
        lambda: not nodes.get_draining_nodes(timeout=RPC_SECONDS).keys() - {node_id},
        deadline,
        clock,
    )


def alive(nodes: Nodes) -> dict[str, str]:
    """The addresses of the nodes that are there, by id in hexadecimal."""
    return {
        key.hex(): info.node_manager_address
        for key, info in nodes.get_all_node_info(timeout=RPC_SECONDS).items()
        if info.state == GcsNodeInfo.GcsNodeState.ALIVE
    }


def _until(condition: Callable[[], bool], deadline: float, clock: Clock) -> bool:
    while not condition():
        if clock.time() >= deadline:
            return False
        clock.sleep(POLL_SECONDS)
    return True


def main() -> None:
    """Drain this node, or wait for others; never longer than asked for, and never in vain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="how long at most")
    parser.add_argument("--others", action="store_true", help="wait for the other nodes, the head")
    parser.add_argument("--node-id", help="another node than this pod's, in hexadecimal")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    nodes = GcsClient(address=canonicalize_bootstrap_address_or_die(None))
    address = get_node_ip_address()
    act = wait_for_others if options.others else drain
    try:
        node_id = options.node_id or next(
            (each for each, where in alive(nodes).items() if where == address), None
        )
        if node_id is None:
            logger.info("no node of Ray is at %s", address)
            return
        done = act(nodes, node_id, seconds=options.seconds, clock=time)
    except RpcError as error:  # the cluster went first: nothing here can go on anyway
        logger.warning("Ray does not answer: %s", error)
        return
    logger.info("node %s is %s", node_id, "done" if done else "cut off")


if __name__ == "__main__":
    main()
