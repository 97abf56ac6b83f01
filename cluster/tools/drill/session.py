"""A drill from nothing: a model, its answers, a cluster, clients, and the plan run on them."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import transformers

from cluster.actors.machine import serving_machine
from cluster.actors.ports import free_ports
from cluster.config import DrafthouseConfig
from cluster.tools.bench.progress import Report, silent
from cluster.tools.checkpoints import make_checkpoint
from cluster.tools.drill.client import Gateways
from cluster.tools.drill.layout import layout, spread
from cluster.tools.drill.local_fleet import LocalFleet
from cluster.tools.drill.questions import make_questions, undisturbed
from cluster.tools.drill.record import DrillOutcome
from cluster.tools.drill.run import Drill, DrillPlan
from cluster.tools.drill.streams import Streams

HOST = "127.0.0.1"
TINY_LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the cluster and its load. An engine runs `num_seqs` sequences at once."""

    num_targets: int = 2
    num_seqs: int = 16
    max_tokens: int = 400


@contextmanager
def tiny_model() -> Iterator[Path]:
    """A small random checkpoint, for as long as the block runs."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="drafthouse-drill-") as folder:
        yield make_checkpoint(Path(folder) / "model", num_layers=TINY_LAYERS)


@asynccontextmanager
async def fleet_of(config: DrafthouseConfig, sizes: Sizes) -> AsyncIterator[LocalFleet]:
    """A whole cluster for the configuration, on nodes of this machine."""
    [http_port] = free_ports(HOST, 1)
    placed = spread(
        config,
        num_targets=sizes.num_targets,
        host=HOST,
        http_port=http_port,
        num_seqs=sizes.num_seqs,
    )
    # In this thread: Ray wants its handlers of signals there, and nothing else runs yet.
    with serving_machine(placed.gateway) as machine:
        fleet = LocalFleet(machine, placed, layout(sizes.num_targets))
        await asyncio.to_thread(fleet.deploy)
        yield fleet


@asynccontextmanager
async def clients_of(fleet: LocalFleet) -> AsyncIterator[Gateways]:
    """What knows the fleet's gateways."""

    async def look_up() -> tuple[str, ...]:
        return await asyncio.to_thread(fleet.addresses)

    gateways = Gateways(look_up)
    following = asyncio.create_task(gateways.follow())
    try:
        yield gateways
    finally:
        following.cancel()
        await gateways.close()


async def run_drill(
    config: DrafthouseConfig,
    plan: DrillPlan,
    sizes: Sizes,
    *,
    num_streams: int,
    report: Report = silent,
) -> DrillOutcome:
    """Serve the configuration on nodes of this machine, and go through with the plan.

    A single engine has to have room for all streams.
    """
    sizes = replace(sizes, num_seqs=max(sizes.num_seqs, num_streams))
    report("reference", 0, 1)
    questions = make_questions(num_streams, max_tokens=sizes.max_tokens)
    answers = await undisturbed(config, questions)
    report("reference", 1, 1)
    async with fleet_of(config, sizes) as fleet, clients_of(fleet) as gateways:
        streams = Streams(gateways, questions, answers, num_lanes=num_streams)
        return await Drill(plan, fleet, streams, report=report).run()
