"""A rank of a tensor-parallel target as an actor: one process, one part of the model."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from cluster.config import DrafthouseConfig
from cluster.garbage import freeze_loaded
from cluster.logs import setup_logging
from cluster.messages import StepOutput

if TYPE_CHECKING:
    from cluster.rank import Meeting, RankInfo


class RankActor:
    """A `Rank` behind calls. They run one after another in a thread of their own, but `outlive`."""

    def __init__(self, config: DrafthouseConfig, rank: int, *, name: str) -> None:
        # Whoever directs ranks knows this class too, and has no use for torch.
        from cluster.rank import Rank  # noqa: PLC0415

        setup_logging(name, config.observability)
        self._rank = Rank(config, rank)

    def prepare(self) -> str:
        """Have the model at hand; the id of this node. Raises ConfigurationError."""
        self._rank.prepare()
        return str(ray.get_runtime_context().get_node_id())

    def open_store(self) -> tuple[str, int]:
        """Where the others find this rank: address of its node, and port."""
        host = str(ray.util.get_node_ip_address())
        return host, self._rank.open_store(host)

    def join(self, meeting: "Meeting") -> "RankInfo":
        """Meet the others and load; as `Rank.join`."""
        info = self._rank.join(meeting)
        freeze_loaded()
        return info

    def step(self, packed: bytes) -> StepOutput | None:
        """Take part in a step; as `Rank.step`."""
        return self._rank.step(packed)

    def computed_seconds(self) -> float:
        """What the last step took here."""
        return self._rank.computed_seconds

    def write_noise(self, block_table: Sequence[int], num_tokens: int) -> None:
        """Have keys and values at the first positions, as if they were computed."""
        self._rank.write_noise(block_table, num_tokens)

    def self_check(self) -> tuple[str, ...]:
        """The schedules whose results differ in some bit on this rank."""
        return self._rank.self_check()

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator] # Ray has no types
    def outlive(self) -> None:
        """Pend for as long as the process lives: who awaits this hears of its death."""
        threading.Event().wait()
