"""The same requests to a whole cluster over gRPC and to the engine in process, in turn."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.table import Table

from cluster.request import Request
from cluster.tools.bench.engine import EnginePlan, in_turn, target_config
from cluster.tools.bench.figures import Rounds, Wave, median_ratio
from cluster.tools.bench.lanes import Lane, Variant, open_lab
from cluster.tools.bench.progress import Report
from cluster.tools.bench.served import Address, run_served, served
from cluster.tools.page import read_page

NUM_DRAFTS = 4
IN_PROCESS = Variant("float32", "ngram", NUM_DRAFTS)
OVER_GRPC = replace(IN_PROCESS, draft="ngram over gRPC")


@dataclass(frozen=True, slots=True)
class ServedRow:
    """Both ways at one number of requests at once."""

    concurrency: int
    over_grpc: Rounds
    in_process: Rounds
    deliveries: Mapping[float, float]  # steps' tokens that were written within so many seconds

    @property
    def ratio(self) -> float:
        """Tokens per second over gRPC over those in process."""
        return median_ratio(self.over_grpc.rates, self.in_process.rates)

    @property
    def delivery_seconds(self) -> float:
        """The median from the engine's step to its tokens being written, linear in its bucket."""
        half = self.deliveries[math.inf] / 2
        low, below = 0.0, 0.0
        for bound, count in sorted(self.deliveries.items()):
            if count >= half and bound < math.inf:
                return low + (bound - low) * (half - below) / max(count - below, 1)
            low, below = bound, count
        return math.inf

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "concurrency": self.concurrency,
            "tokens_per_second": self.over_grpc.rate,
            "in_process_tokens_per_second": self.in_process.rate,
            "ratio": self.ratio,
            "delivery_seconds": self.delivery_seconds,
        }


@dataclass(frozen=True, slots=True)
class ServedReport:
    """A row for each number of requests at once."""

    rows: tuple[ServedRow, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [row.as_json() for row in self.rows]

    def __rich__(self) -> Table:
        table = Table(title="Tokens per second", title_justify="left")
        for heading in ("at once", "over gRPC", "in process", "ratio", "delivery"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(
                str(row.concurrency),
                f"{row.over_grpc.rate:.1f}",
                f"{row.in_process.rate:.1f}",
                f"{row.ratio:.2f}x",
                f"{row.delivery_seconds * 1000:.1f} ms",
            )
        return table


async def bench_served(plan: EnginePlan, *, report: Report) -> ServedReport:
    """A server of its own and an engine here, both with IN_PROCESS, at the plan's concurrencies.

    Both may find prompts in their caches. Raises ConfigurationError.
    """
    prompts = plan.prompts()
    target = target_config(plan, prompts)
    config = {"target": {"model": plan.target, "max_num_seqs": target.max_num_seqs}}
    rows = []
    async with (
        served(config, IN_PROCESS.draft, num_speculative_tokens=NUM_DRAFTS) as address,
        open_lab(target) as lab,
        lab.lane(IN_PROCESS) as lane,
    ):
        runs = {OVER_GRPC: partial(run_served, address), IN_PROCESS: partial(_run_unsalted, lane)}
        for concurrency in dict.fromkeys(plan.concurrencies):
            asked = prompts[: plan.num_asked(concurrency)]
            before = await _deliveries(address)
            rounds = await in_turn(plan, runs, asked, concurrency, report=report)
            after = await _deliveries(address)
            grown = {bound: count - before[bound] for bound, count in after.items()}
            rows.append(ServedRow(concurrency, rounds[OVER_GRPC], rounds[IN_PROCESS], grown))
    return ServedReport(tuple(rows))


async def _deliveries(address: Address) -> dict[float, float]:
    page = await asyncio.to_thread(read_page, address.http)
    return page.buckets("drafthouse_delivery_seconds")


async def _run_unsalted(lane: Lane, requests: Sequence[Request]) -> Wave:
    """Without cache salts, which the wire does not carry."""
    return await lane.run([replace(request, cache_salt="") for request in requests])
