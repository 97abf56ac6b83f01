"""`drafthouse bench` and `drafthouse validate`: what this machine does, and what would fit it."""

import json
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args

import typer
import uvloop
from rich.console import Console

from cluster.config import (
    BUILTIN_MODEL,
    DType,
    SpeculationConfig,
    TargetConfig,
    prepare_ray_environment,
)
from cluster.garbage import freeze_loaded
from cluster.tools.bench.progress import Report, bars

WIDTH = 160  # of tables that go to a file or to another program

bench = typer.Typer(invoke_without_command=True)

Target = Annotated[str, typer.Option(help="Hugging Face id, folder, .gguf file or built-in name.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON lines with turns, prompt or messages; the built-in ones if not given.",
    ),
]
CategoryField = Annotated[str, typer.Option(help="Of a line.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times everything is measured.")]
DTypes = Annotated[
    list[str] | None, typer.Option("--dtype", help="float32 (the default) or int8; several.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Result(Protocol):
    """What a benchmark found; rich shows it as a table."""

    def as_json(self) -> Any:  # noqa: ANN401 - plain data
        """Plain data."""
        ...


R = TypeVar("R", bound=Result)


def creatable(path: Path | None) -> Path | None:
    """An option's callback: a file can be made there. Better said before the work than after it."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder")
    return path


@bench.callback()
def whole(
    context: typer.Context, *, target: Target = BUILTIN_MODEL, json_output: Json = False
) -> None:
    """Measure this machine: steps, decoding, drafts, and the whole cluster over gRPC.

    With a command, only what that one measures.
    """
    if context.invoked_subcommand is not None:
        return
    from cluster.tools.bench.run import run_bench

    show(partial(run_bench, target), json_output=json_output)


@bench.command()
def engine(  # noqa: PLR0913 - one parameter an option
    *,
    workload: Annotated[
        str, typer.Option(help="copy, code, chat, math, spec_bench:PATH or jsonl:PATH.")
    ] = "chat",
    target: Target = BUILTIN_MODEL,
    draft: Annotated[
        list[str] | None, typer.Option(help="off, ngram, ngram:TABLE, REF or ngram+REF; several.")
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None, typer.Option(help="Drafts per step, 4 if not given; several.")
    ] = None,
    concurrency: Annotated[
        list[str] | None, typer.Option(help="Requests at once, 1 if not given; several.")
    ] = None,
    dtype: DTypes = None,
    verification: Annotated[
        Literal["coupled", "ratio"], typer.Option(help="How drafts are verified.")
    ] = "coupled",
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of the workload, in full waves.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens.")
    ] = False,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Also transformers' generate, as a baseline.")
    ] = False,
    rounds: Rounds = 3,
    json_output: Json = False,
) -> None:
    """Compare engines: every concurrency with every number format, draft and K, in turn.

    Options with several values are given more than once, or as a list with commas. The engine
    without drafts is always measured: it is what the others are compared with.
    """
    from cluster.tools.bench.engine import EnginePlan, bench_engine
    from cluster.tools.bench.workloads import parse_workload

    plan = EnginePlan(
        target=target,
        workload=parse_workload(workload),
        concurrencies=numbers(concurrency, 1, option="--concurrency", least=1),
        drafts=values(draft, "ngram"),
        num_speculative_tokens=numbers(
            num_speculative_tokens, 4, option="--num-speculative-tokens", least=0
        ),
        dtypes=dtypes(dtype),
        speculation=SpeculationConfig(verification=verification),
        transformers=transformers,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        rounds=rounds,
    )
    show(partial(bench_engine, plan), json_output=json_output)


@bench.command()
def served(
    *,
    workload: Annotated[str, typer.Option(help="As for `bench engine`.")] = "chat",
    target: Target = BUILTIN_MODEL,
    concurrency: Annotated[
        list[str] | None, typer.Option(help="Requests at once, 1, 8 and 16 if not given; several.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of the workload, in full waves.")] = 8,
    rounds: Rounds = 3,
    json_output: Json = False,
) -> None:
    """Compare the whole cluster over gRPC with the engine in process."""
    from cluster.tools.bench.engine import EnginePlan
    from cluster.tools.bench.over_grpc import bench_served
    from cluster.tools.bench.workloads import parse_workload

    plan = EnginePlan(
        target=target,
        workload=parse_workload(workload),
        concurrencies=numbers(concurrency, "1,8,16", option="--concurrency", least=1),
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        rounds=rounds,
    )
    show(partial(bench_served, plan), json_output=json_output)


@bench.command()
def steps(
    *,
    target: Target = BUILTIN_MODEL,
    dtype: DTypes = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times everything is measured.")] = 15,
    json_output: Json = False,
) -> None:
    """Time one target step by rows, and the matrix work in it."""
    from cluster.local import in_passing_thread
    from cluster.models.reference import resolve
    from cluster.tools.bench.steps import measure_steps

    async def measure(*, report: Report) -> Result:
        return await in_passing_thread(
            partial(
                measure_steps,
                target,
                resolve(target),
                dtypes(dtype),
                report=report,
                repeats=repeats,
            )
        )

    show(measure, json_output=json_output)


@bench.command()
def parallel(
    *,
    target: Target = BUILTIN_MODEL,
    tensor_parallel_size: Annotated[int, typer.Option(min=2, help="Ranks.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times everything is measured.")] = 40,
    json_output: Json = False,
) -> None:
    """Time steps of a target in several processes, and what directing them costs."""
    prepare_ray_environment(joining=False)
    from cluster.tools.bench.parallel import bench_parallel

    run = partial(bench_parallel, target, num_ranks=tensor_parallel_size, repeats=repeats)
    show(run, json_output=json_output)


@bench.command()
def prefix(
    *,
    target: Target = BUILTIN_MODEL,
    dtype: DTypes = None,
    history_tokens: Annotated[int, typer.Option(min=1)] = 1500,
    rounds: Rounds = 5,
    json_output: Json = False,
) -> None:
    """Time the start of a chat's second turn with the prefix cache, and without."""
    from cluster.tools.bench.prefix import bench_prefix

    run = partial(
        bench_prefix, target, dtypes=dtypes(dtype), history_tokens=history_tokens, rounds=rounds
    )
    show(run, json_output=json_output)


@bench.command()
def interference(
    *,
    target: Target = BUILTIN_MODEL,
    dtype: DTypes = None,
    num_streams: Annotated[int, typer.Option(min=1, help="Streams under way.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of the prompt that arrives.")] = 4000,
    rounds: Rounds = 3,
    json_output: Json = False,
) -> None:
    """Time the tokens of running streams while a long prompt is taken in."""
    from cluster.tools.bench.interference import bench_interference

    run = partial(
        bench_interference,
        target,
        dtypes=dtypes(dtype),
        num_streams=num_streams,
        prompt_tokens=prompt_tokens,
        rounds=rounds,
    )
    show(run, json_output=json_output)


def validate(
    *,
    draft: Annotated[str, typer.Option(help="off, ngram, ngram:TABLE, a model REF, or ngram+REF.")],
    target: Target = BUILTIN_MODEL,
    num_speculative_tokens: Annotated[int, typer.Option(min=0, max=64)] = 4,
    dtype: Annotated[str, typer.Option(help="Number format of target and draft.")] = "float32",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Tokens of a context.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences at once.")] = None,
    sample: Annotated[bool, typer.Option(help="Measure what drafts bring.")] = True,
    json_output: Json = False,
) -> None:
    """Say whether a target and a drafter fit together and this machine, and what they bring.

    Ends with 1 when they do not fit, and says why.
    """
    from cluster.tools.bench.lanes import Variant
    from cluster.tools.validate import validate as check

    [number_format] = dtypes([dtype])
    sizes = {"model": target, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    given = {name: size for name, size in sizes.items() if size is not None}
    run = partial(
        check,
        TargetConfig.model_validate(given),
        Variant(number_format, draft, num_speculative_tokens),
        sample=sample,
    )
    verdict = show(run, json_output=json_output)
    if not verdict.fits:
        raise typer.Exit(1)


def show(run: Callable[..., Awaitable[R]], *, json_output: bool) -> R:
    """Run to the end, with bars where a person looks, then print what was found and return it.

    With the event loop and the garbage collector as the processes that serve have them.
    """

    async def measure() -> R:
        with bars(Console(stderr=True), shown=not json_output) as report:
            return await run(report=report)

    freeze_loaded()
    result = uvloop.run(measure())
    console = Console(highlight=False)
    if json_output:
        console.print_json(json.dumps(result.as_json()))
    else:
        console.width = max(console.width, WIDTH) if not console.is_terminal else console.width
        console.print(result)
    return result


def values(given: Iterable[str] | None, default: str) -> list[str]:
    """All values of an option that was given several times, or with commas, or not at all."""
    return [value.strip() for part in given or (default,) for value in part.split(",")]


def numbers(
    given: Iterable[str] | None, default: int | str, *, option: str, least: int
) -> list[int]:
    """The same as whole numbers. Raises typer.BadParameter."""
    found = []
    for value in values(given, str(default)):
        if not value.isdecimal() or int(value) < least:
            raise typer.BadParameter(
                f"{value!r} is no whole number from {least} on", param_hint=option
            )
        found.append(int(value))
    return found


def dtypes(given: Iterable[str] | None) -> list[DType]:
    """The same as number formats. Raises typer.BadParameter."""
    known = {dtype: dtype for dtype in get_args(DType)}
    asked = values(given, "float32")
    for value in asked:
        if value not in known:
            raise typer.BadParameter(
                f"{value!r} is none of {', '.join(known)}", param_hint="--dtype"
            )
    return [known[value] for value in asked]
