"""`drafthouse bench control` and `drafthouse profile`: how far guessing pays on this machine."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cluster.cli_bench import (
    DTypes,
    Json,
    Rounds,
    Target,
    creatable,
    dtypes,
    numbers,
    show,
    values,
)
from cluster.config import BUILTIN_MODEL, SpeculationConfig, TargetConfig, prepare_ray_environment
from cluster.tools.bench.progress import Report

E = TypeVar("E", bound=StrEnum)


def control(  # noqa: PLR0913 - one parameter an option
    *,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="a (timed parts), b (simulated), c (the real model), decision, load; several."
        ),
    ] = None,
    target: Target = BUILTIN_MODEL,
    draft: Annotated[
        list[str] | None, typer.Option(help="c: ngram, ngram:TABLE or a model; several.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="c: copy, code, chat, math, random, mixed or a file; several."),
    ] = None,
    concurrency: Annotated[
        list[str] | None, typer.Option(help="c: requests at once; b: sequences; several.")
    ] = None,
    fixed: Annotated[list[str] | None, typer.Option(help="c: the fixed K; several.")] = None,
    dtype: DTypes = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="c: of every answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="c: 0 is greedy.")] = 0.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="c: of a workload, in full waves.")] = 8,
    rounds: Rounds = 3,
    way: Annotated[
        list[str] | None, typer.Option(help="a: off, waiting, ahead, worker; several.")
    ] = None,
    step_ms: Annotated[list[str] | None, typer.Option(help="a: of a step; several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.2, help="a, load: of each measurement.")] = 6.0,
    simulated_steps: Annotated[int, typer.Option(min=450, help="b: of each world.")] = 1000,
    seed: Annotated[
        list[str] | None, typer.Option(help="b: of each world; several tell the noise.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report", dir_okay=False, callback=creatable, help="Write an HTML page there."
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Prove the controller: timed parts, simulations, the real model, its own cost, open load.

    All parts take an hour. For a short look: --part c --workload copy,chat --concurrency 1,8
    --max-tokens 32 --num-prompts 4 --rounds 1.
    """
    prepare_ray_environment(joining=False)
    from cluster.tools.bench.control import ControlPlan, Part, bench_control
    from cluster.tools.bench.orchestration import STEP_SECONDS, OrchestrationPlan, Way
    from cluster.tools.bench.real import CONCURRENCIES, FIXED, WORKLOADS, RealPlan

    def some(given: list[str] | None, default: Sequence[float], option: str) -> list[int]:
        usual = ",".join(f"{each:g}" for each in default)
        return numbers(given or [usual], 0, option=option, least=1)

    [number_format] = dtypes(dtype)
    plan = ControlPlan(
        parts=_members(part, Part, option="--part"),
        timed=OrchestrationPlan(
            step_seconds=[
                each / 1000
                for each in some(step_ms, [each * 1000 for each in STEP_SECONDS], "--step-ms")
            ],
            ways=_members(way, Way, option="--way"),
            seconds=seconds,
        ),
        real=RealPlan(
            target=target,
            drafts=values(draft, "ngram"),
            workloads=values(workload, ",".join(WORKLOADS)),
            concurrencies=some(concurrency, CONCURRENCIES, "--concurrency"),
            fixed=some(fixed, FIXED, "--fixed"),
            dtype=number_format,
            max_tokens=max_tokens,
            temperature=temperature,
            num_prompts=num_prompts,
            rounds=rounds,
        ),
        simulated_steps=simulated_steps,
        batch_sizes=some(concurrency, (), "--concurrency") if concurrency else None,
        seeds=numbers(seed or ["0"], 0, option="--seed", least=0),
        load_seconds=seconds,
    )
    found = show(partial(bench_control, plan), json_output=json_output)
    if page is not None:
        found.write_page(page)


def profile(
    *,
    target: Target = BUILTIN_MODEL,
    dtype: Annotated[str, typer.Option(help="float32, int8, bfloat16 or float16.")] = "float32",
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences at once.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Tokens of a context.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=0, max=64, help="Drafts of a sequence, at most.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(dir_okay=False, callback=creatable, help="Draw it there.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Time the target's steps, store them for the next start, and say what drafts could bring."""
    from cluster.local import in_passing_thread
    from cluster.tools.profile import ProfileReport
    from cluster.tools.profile import profile as measure_profile
    from cluster.tools.profile_picture import draw_profile

    [number_format] = dtypes([dtype])
    given = {"model": target, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    config = TargetConfig.model_validate(
        {name: value for name, value in given.items() if value is not None}
        | {"dtype": number_format}
    )
    most = SpeculationConfig().num_speculative_tokens
    if num_speculative_tokens is not None:
        most = num_speculative_tokens

    async def measure(*, report: Report) -> ProfileReport:
        return await in_passing_thread(
            partial(measure_profile, config, max_num_speculative_tokens=most, report=report)
        )

    found = show(measure, json_output=json_output)
    if png is not None:
        draw_profile(found, png)


def _members(given: Iterable[str] | None, kind: type[E], *, option: str) -> list[E]:
    """The same as members of an enumeration, by value or name; all of them if none is given.

    Raises typer.BadParameter.
    """
    known = {text: member for member in kind for text in (member.value, member.name.lower())}
    asked = values(given, ",".join(member.value for member in kind))
    for value in asked:
        if value not in known:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}", param_hint=option)
    return [known[value] for value in asked]
