"""`drafthouse drill` and `drafthouse soak`: a cluster on this machine, and what it bears."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli_bench import Json, show
from cluster.config import DrafthouseConfig, load_config, prepare_ray_environment
from cluster.tools.bench.progress import Report

if TYPE_CHECKING:
    from cluster.tools.drill.record import DrillOutcome
    from cluster.tools.drill.soak_record import SoakOutcome

Config = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="As for serve; spread anew.")
]
Target = Annotated[
    str | None, typer.Option(help="Model reference; a tiny random model if not given.")
]
Draft = Annotated[
    str | None, typer.Option(help="As for serve; the target itself, in workers, if not given.")
]
Parallel = Annotated[int, typer.Option(min=1, help="Processes that hold a target together.")]
Targets = Annotated[int, typer.Option(min=1, help="Engines, each on a node of its own.")]
Streams = Annotated[int, typer.Option(min=1, help="Always in flight.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Of each answer.")]
Seed = Annotated[int, typer.Option(min=0)]
Kinds = Annotated[
    list[str] | None,
    typer.Option("--kind", help="Only these faults, such as 'engine kill'; several. All else."),
]


def drill(  # noqa: PLR0913 - one parameter an option
    *,
    faults: Annotated[int, typer.Option(min=1, help="How many.")] = 200,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no fault later than that.")
    ] = None,
    kind: Kinds = None,
    seed: Seed = 0,
    streams: Streams = 8,
    max_tokens: MaxTokens = 400,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    tensor_parallel_size: Parallel = 1,
    targets: Targets = 2,
    json_output: Json = False,
) -> None:
    """Break a cluster of several Ray nodes on this machine, again and again, under load.

    Every stream is compared with what one engine alone says, token by token. Ends with 1 when one
    broke, lost or changed a token, or when the cluster did not recover. A gateway takes its
    connections with it: its clients ask another one again, which is counted apart. Partitions of
    the network are not among the faults: nodes of one machine share it.
    """
    prepare_ray_environment(joining=False)
    from cluster.tools.drill.faults import find
    from cluster.tools.drill.run import DrillPlan
    from cluster.tools.drill.session import Sizes, run_drill

    plan = DrillPlan(
        kinds=find(kind or ()),
        num_faults=faults,
        seed=seed,
        seconds=float("inf") if minutes is None else 60 * minutes,
    )
    sizes = Sizes(num_targets=targets, max_tokens=max_tokens)

    async def run(*, report: Report) -> "DrillOutcome":
        async with AsyncExitStack() as stack:
            what = _configured(config, target, draft, tensor_parallel_size, stack)
            return await run_drill(what, plan, sizes, num_streams=streams, report=report)

    if not show(run, json_output=json_output).passed:
        raise typer.Exit(1)


def soak(  # noqa: PLR0913 - one parameter an option
    *,
    minutes: Annotated[float, typer.Option(min=0, help="Of load.")] = 20.0,
    load: Annotated[float, typer.Option(min=0.01, help="Times what can be served.")] = 1.5,
    faults: Annotated[int, typer.Option(min=0, help="On the way, at even distances.")] = 0,
    kind: Kinds = None,
    seed: Seed = 0,
    max_tokens: MaxTokens = 200,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="At once in an engine.")] = 8,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    tensor_parallel_size: Parallel = 1,
    targets: Targets = 2,
    json_output: Json = False,
) -> None:
    """Load a cluster over its capacity, with cancels, deadlines and bad input, for a long time.

    In the end slots, blocks, drafts, processes, descriptors and memory must be where they began,
    and every token right; else it ends with 1.
    """
    prepare_ray_environment(joining=False)
    from cluster.tools.drill.faults import find
    from cluster.tools.drill.session import Sizes
    from cluster.tools.drill.soak import SoakPlan, run_soak

    plan = SoakPlan(
        seconds=60 * minutes, load=load, kinds=find(kind or ()), num_faults=faults, seed=seed
    )
    sizes = Sizes(num_targets=targets, num_seqs=max_num_seqs, max_tokens=max_tokens)

    async def run(*, report: Report) -> "SoakOutcome":
        async with AsyncExitStack() as stack:
            what = _configured(config, target, draft, tensor_parallel_size, stack)
            return await run_soak(what, plan, sizes, report=report)

    if not show(run, json_output=json_output).passed:
        raise typer.Exit(1)


def _configured(
    config: Path | None,
    target: str | None,
    draft: str | None,
    tensor_parallel_size: int,
    stack: AsyncExitStack,
) -> DrafthouseConfig:
    """What is served, from what the options say."""
    from cluster.tools.drill.layout import configured
    from cluster.tools.drill.session import tiny_model

    if config is not None:
        if (target, draft, tensor_parallel_size) != (None, None, 1):
            raise typer.BadParameter("--config says it all: no --target, --draft or size beside it")
        return load_config(config)
    tiny = target is None
    model = str(stack.enter_context(tiny_model())) if target is None else target
    return configured(model, draft=draft, tensor_parallel_size=tensor_parallel_size, tiny=tiny)
