"""`drafthouse simulate`: what a cluster would make of a trace of requests."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_bench import Json, show
from cluster.config import DrafthouseConfig, load_config, parse_config
from cluster.tools.bench.progress import Report


def simulate(  # noqa: PLR0913 - one parameter an option
    trace: Annotated[
        str,
        typer.Argument(
            help="poisson:rate=R,requests=N; bursty:...,burst=B,period=S; diurnal:...,depth=D,"
            "period=S; each with prompt=, output=, acceptance=. Or a file of JSON lines."
        ),
    ],
    *,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="As for serve.")
    ] = None,
    targets: Annotated[int | None, typer.Option(min=1, help="Instead of the file's.")] = None,
    drafts: Annotated[
        int | None, typer.Option(min=0, help="Draft workers, instead of the file's; 0: n-gram.")
    ] = None,
    cost: Annotated[
        str,
        typer.Option(
            help="Of a step: cpu-like, memory-bound, compute-bound, staircase, or what "
            "`drafthouse profile --json` wrote."
        ),
    ] = "cpu-like",
    draft_ms: Annotated[
        float, typer.Option(min=0, help="A worker's, for one position of a draft.")
    ] = 5.0,
    draft_sequence_ms: Annotated[
        float, typer.Option(min=0, help="And for each sequence more.")
    ] = 0.3,
    start_seconds: Annotated[
        float, typer.Option(min=0, help="Until a target takes requests; a draft worker: a third.")
    ] = 30.0,
    round_seconds: Annotated[
        float, typer.Option(min=0.1, help="Between two rounds of the router's slow loop.")
    ] = 10.0,
    deadline: Annotated[
        float | None, typer.Option(min=0, help="Seconds in which a request must begin.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_output: Json = False,
) -> None:
    """Play a trace on a cluster in virtual time: real routing, scaling and controller."""
    from cluster.tools.simulation.cluster import SimulatedCluster, SimulationPlan
    from cluster.tools.simulation.costs import read_cost
    from cluster.tools.simulation.drafting import DraftCosts
    from cluster.tools.simulation.outcome import Outcome
    from cluster.tools.simulation.traffic import read_traffic

    plan = SimulationPlan(
        config=_sized(load_config(config) if config else DrafthouseConfig(), targets, drafts),
        cost=read_cost(cost),
        draft_costs=DraftCosts(seconds=draft_ms / 1e3, sequence_seconds=draft_sequence_ms / 1e3),
        start_seconds=start_seconds,
        round_seconds=round_seconds,
        deadline_seconds=deadline,
    )
    traffic = read_traffic(trace, seed=seed)

    async def run(*, report: Report) -> Outcome:
        return await asyncio.to_thread(SimulatedCluster(plan, traffic).run, report=report)

    show(run, json_output=json_output)


def _sized(config: DrafthouseConfig, targets: int | None, drafts: int | None) -> DrafthouseConfig:
    """The configuration with other numbers of replicas."""
    data = config.model_dump(mode="json")
    if targets is not None:
        data["target"]["num_replicas"] = targets
    if drafts is not None:
        worker = {"kind": "model", "model": "simulated", "num_replicas": drafts}
        data["drafter"] = worker if drafts else {"kind": "ngram"}
    return parse_config(data)
