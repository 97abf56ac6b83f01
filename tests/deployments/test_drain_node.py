"""What a pod does before it ends, in virtual time, against a list of nodes."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.core.generated.gcs_pb2 import GcsNodeInfo

from deployments.drain_node import drain, wait_for_others

HERE, THERE = "aa" * 28, "bb" * 28
STATES = GcsNodeInfo.GcsNodeState


@dataclass
class Clock:
    """Time that passes only by sleeping."""

    now: float = 1000.0

    def time(self) -> float:
        """Seconds since the epoch."""
        return self.now

    def sleep(self, seconds: float, /) -> None:
        """Pass."""
        self.now += seconds


@dataclass
class Nodes:
    """Two nodes; the first is empty `busy_seconds` after it is asked to be drained."""

    clock: Clock
    busy_seconds: float = 0.0
    accepts: bool = True
    draining: dict[str, float] = field(default_factory=dict)  # until when each takes
    asked: list[tuple[str, int]] = field(default_factory=list)

    def get_all_node_info(self, *, timeout: float) -> dict[Any, Any]:
        """Both, the drained one dead when its time is over."""
        del timeout
        return {
            bytes.fromhex(each): SimpleNamespace(
                node_manager_address=each[:2],
                state=STATES.DEAD
                if self.draining.get(each, self.clock.now + 1) <= self.clock.now
                else STATES.ALIVE,
            )
            for each in (HERE, THERE)
        }

    def get_draining_nodes(self, *, timeout: float) -> dict[str, int]:
        """Those whose time is not over."""
        del timeout
        return {node: 0 for node, until in self.draining.items() if until > self.clock.now}

    def drain_node(
        self, node_id: str, reason: int, reason_message: str, deadline_timestamp_ms: int
    ) -> tuple[bool, str]:
        """Say yes or no."""
        assert reason == 2, "anything else may be refused by a node that works"
        assert reason_message
        self.asked.append((node_id, deadline_timestamp_ms))
        self.draining[node_id] = self.clock.now + self.busy_seconds
        return self.accepts, "" if self.accepts else "busy"


def test_it_returns_as_soon_as_the_node_is_empty() -> None:
    """A pod without streams is gone at once, and Ray knows until when it may stay."""
    clock = Clock()
    nodes = Nodes(clock, busy_seconds=7.5)
    assert drain(nodes, HERE, seconds=150.0, clock=clock)
    assert nodes.asked == [(HERE, 1_150_000)]
    assert clock.now == 1008.0


def test_it_never_waits_longer_than_it_may() -> None:
    """The pod is killed a little later anyway."""
    clock = Clock()
    assert not drain(Nodes(clock, busy_seconds=1e9), HERE, seconds=150.0, clock=clock)
    assert clock.now == 1150.0


def test_a_refusal_is_not_waited_for() -> None:
    """Nothing would change."""
    clock = Clock()
    assert not drain(Nodes(clock, accepts=False), HERE, seconds=150.0, clock=clock)
    assert clock.now == 1000.0


def test_the_head_waits_for_the_others() -> None:
    """Without it their streams could not end; when none is drained it goes after a moment."""
    clock = Clock()
    nodes = Nodes(clock, draining={THERE: 1040.0, HERE: 2000.0})
    assert wait_for_others(nodes, HERE, seconds=150.0, clock=clock)
    assert clock.now == 1040.0
    assert wait_for_others(nodes, HERE, seconds=150.0, clock=clock)
    assert clock.now == 1045.0
    nodes.draining = {THERE: 1e9}
    assert not wait_for_others(nodes, HERE, seconds=150.0, clock=clock)
    assert clock.now == 1195.0
