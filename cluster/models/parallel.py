"""One model over several ranks: what they exchange, and the layers that need it.

Linears into heads and into the feed-forward part are split by output, those out of them by input,
whose partial products are summed over all ranks; so are rows of the embedding. The head is split
by vocabulary, and rank 0 alone gets whole logits.

Sums are made in the order of the ranks, from all partial products, on every rank. An all-reduce
would sum in an order that depends on an element's place and on how many there are (seen with gloo
on three ranks: the same row twice in one tensor got different bits), so that a row's bits would
depend on its company. Between two ranks, the common case on CPUs, it sends as much.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # public, not by name
from torch.nn import functional

from cluster.errors import TargetUnavailable
from cluster.models.linear import Linear

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Ranks:
    """A rank and its way to the others.

    All ranks call the same methods in the same order. Each raises TargetUnavailable when another
    rank is gone, or does not come within the group's time-out.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, to the same bits on each."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._exchange(lambda: dist.all_gather(parts, part.contiguous(), group=self._group))
        total = parts[0] + parts[1]
        for other in parts[2:]:
            total += other
        return total

    def joined(self, columns: Tensor) -> Tensor | None:
        """All ranks' `[rows, columns]` side by side on rank 0, None elsewhere."""
        parts = [torch.empty_like(columns) for _ in range(self.size)] if self.rank == 0 else None
        self._exchange(lambda: dist.gather(columns.contiguous(), parts, group=self._group))
        return None if parts is None else torch.cat(parts, dim=-1)

    def _exchange(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TargetUnavailable(
                f"rank {self.rank} does not reach the others: {reason}"
            ) from error


class RowParallelLinear:
    """A linear split by input: each rank has the product of its part, and the sum is the whole.

    Only one rank's part may have the bias. Parts in int8 scale their own inputs by their own
    largest, which is no coarser than the whole row's, and takes no exchange.
    """

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks

    def __call__(self, rows: Tensor) -> Tensor:
        """The product."""
        return self._ranks.total(self._part(rows))

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` plus the product."""
        return self(rows).add_(residual)


class VocabularyParallelEmbedding:
    """An embedding split by token id; `weight`, `[entries, hidden]`, begins at `first_token_id`."""

    def __init__(self, weight: Tensor, *, first_token_id: int, ranks: Ranks) -> None:
        self._weight = weight
        self._first_token_id = first_token_id
        self._ranks = ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[rows]` to `[rows, hidden]`: one rank has a row, the others add zeros."""
        own = token_ids - self._first_token_id
        elsewhere = (own < 0) | (own >= len(self._weight))
        rows = functional.embedding(own.masked_fill(elsewhere, 0), self._weight)
        return self._ranks.total(rows.masked_fill_(elsewhere[:, None], 0.0))


class VocabularyParallelHead:
    """A head split by token id, each rank having equally many of `vocab_size` and some padding."""

    def __init__(self, part: Linear, *, vocab_size: int, ranks: Ranks) -> None:
        self._part = part
        self._vocab_size = vocab_size
        self._ranks = ranks

    def __call__(self, rows: Tensor) -> Tensor:
        """Whole logits, `[rows, vocab]`, on rank 0; a rank's own part of them elsewhere."""
        own = self._part(rows)
        joined = self._ranks.joined(own)
        return own if joined is None else joined[:, : self._vocab_size]


def open_store(host: str, num_ranks: int, *, timeout_seconds: float) -> TCPStore:
    """Where ranks meet, on a port that nobody had: `store.port`. It must outlive the group."""
    return TCPStore(
        host,
        0,
        num_ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def reach_store(host: str, port: int, num_ranks: int, *, timeout_seconds: float) -> Store:
    """The store of another rank."""
    return TCPStore(
        host, port, num_ranks, is_master=False, timeout=timedelta(seconds=timeout_seconds)
    )


def join_ranks(
    store: Store, *, rank: int, num_ranks: int, device: str, timeout_seconds: float
) -> Ranks:
    """Meet the other ranks at the store: gloo between CPUs, NCCL between GPUs.

    `timeout_seconds` is how long any exchange may take from then on. A process is in one group at
    a time. gloo listens where the host's own name leads; where that is no way in for other nodes,
    GLOO_SOCKET_IFNAME names the interface.
    """
    dist.init_process_group(
        BACKENDS[torch.device(device).type],
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )
    group = dist.group.WORLD
    assert group is not None
    return Ranks(group)


def leave_ranks() -> None:
    """Leave the group this process is in."""
    dist.destroy_process_group()
