"""One rank of a tensor-parallel target: its part of the weights, and its part in every step.

All ranks are told the same in the same order. Rank 0 draws, verifies and holds the grammars; the
others compute along and answer nothing.
"""

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.config import DrafthouseConfig
from cluster.local import build_target_worker, check_context, use_threads
from cluster.memory import check_rank_memory
from cluster.messages import StepInput, StepOutput
from cluster.models.load import load_decoder, load_spec
from cluster.models.parallel import join_ranks, open_store, reach_store
from cluster.models.reference import resolve
from cluster.models.shard import Shard
from cluster.processor import Processor
from cluster.worker import TargetWorker

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, not by name

MEETING_SECONDS = 120.0  # in which all ranks find the store; every model is at hand by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and among whom a rank computes. `num_ranks_here` share its node with it."""

    host: str
    port: int
    num_ranks_here: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What the one who directs the ranks has to know of them. Rank 0's is the group's."""

    vocab_size: int
    num_blocks: int
    block_size: int
    processor: Processor


class Rank:
    """Complete once it has joined the others: `prepare`, then `join`. Not for two threads.

    Raises TargetUnavailable when another rank is gone, in whatever it computes.
    """

    def __init__(self, config: DrafthouseConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._num_ranks = config.target.tensor_parallel_size
        self._store: TCPStore | None = None
        self._joined: TargetWorker | None = None
        self.computed_seconds = 0.0  # what the last step took here

    def prepare(self) -> None:
        """Have the model at hand and know that it can be split. Raises ConfigurationError."""
        spec = load_spec(resolve(self._config.target.model))
        Shard.of(spec, self._rank, self._num_ranks)
        check_context(self._config.target, spec)

    def open_store(self, host: str) -> int:
        """Listen for the others on this node's address; the port. For rank 0."""
        self._store = open_store(host, self._num_ranks, timeout_seconds=MEETING_SECONDS)
        return int(self._store.port)

    def join(self, meeting: Meeting) -> RankInfo:
        """Meet the others, then load. All ranks are called at the same time, and return alone.

        Raises ConfigurationError when the rank's part does not fit.
        """
        target = self._config.target
        folder = resolve(target.model)
        num_cores = len(os.sched_getaffinity(0))
        use_threads(target.num_threads or max(num_cores // meeting.num_ranks_here, 1))
        shard = Shard.of(load_spec(folder), self._rank, self._num_ranks)
        check_rank_memory(self._config, shard, num_ranks_here=meeting.num_ranks_here)
        store = self._store or reach_store(
            meeting.host, meeting.port, self._num_ranks, timeout_seconds=MEETING_SECONDS
        )
        ranks = join_ranks(
            store,
            rank=self._rank,
            num_ranks=self._num_ranks,
            device=target.device,
            timeout_seconds=target.rank_timeout_seconds,
        )
        decoder = load_decoder(folder, dtype=target.dtype, device=target.device, ranks=ranks)
        worker = self._joined = build_target_worker(target, folder, decoder=decoder)
        return RankInfo(
            vocab_size=worker.vocab_size,
            num_blocks=worker.cache.num_blocks,
            block_size=worker.cache.block_size,
            processor=replace(worker.processor, num_ranks=self._num_ranks),
        )

    def step(self, packed: bytes) -> StepOutput | None:
        """Take part in a step, which is pickled; rank 0 has the answer. Raises as `worker` does."""
        begin = time.perf_counter()
        step: StepInput = pickle.loads(packed)  # noqa: S301 - from the engine, by Ray
        try:
            if self._rank == 0:
                return self._worker.step(step)
            self._worker.follow(step)
            return None
        finally:
            self.computed_seconds = time.perf_counter() - begin

    def write_noise(self, block_table: Sequence[int], num_tokens: int) -> None:
        """Have keys and values at the first positions, as if they were computed."""
        self._worker.cache.write_noise(block_table, num_tokens)

    def self_check(self) -> tuple[str, ...]:
        """The schedules whose results differ in some bit on this rank."""
        return self._worker.self_check()

    @property
    def _worker(self) -> TargetWorker:
        assert self._joined is not None, "before join"
        return self._joined
