"""`drafthouse tune`: what makes drafts fit the target better."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.cli_bench import Json, Target, creatable, show
from cluster.config import BUILTIN_MODEL

tune = typer.Typer(no_args_is_help=True, help="Make drafts fit the target better.")


@tune.callback()
def whole() -> None:
    """Make drafts fit the target better."""


@tune.command()
def ngram(  # noqa: PLR0913 - one parameter an option
    *,
    out: Annotated[
        Path,
        typer.Option(dir_okay=False, callback=creatable, help="The table, for drafter.table."),
    ],
    target: Target = BUILTIN_MODEL,
    prompts: Annotated[
        str, typer.Option(help="copy, code, chat, math, spec_bench:PATH or jsonl:PATH.")
    ] = "chat",
    answers: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Read these, ask nothing.")
    ] = None,
    save_answers: Annotated[
        Path | None,
        typer.Option(dir_okay=False, callback=creatable, help="Write what was answered."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer ones are left out.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    dtype: Annotated[Literal["float32", "int8"], typer.Option(help="Number format.")] = "int8",
    min_count: Annotated[int, typer.Option(min=1, help="Seen less often is left out.")] = 1,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Also measure it, on answers held out.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Make an n-gram table from the target's own greedy answers."""
    from cluster.tools.bench.workloads import parse_workload
    from cluster.tools.tune import TunePlan, tune_ngram

    plan = TunePlan(
        target=target,
        out=out,
        prompts=None if answers is not None else parse_workload(prompts),
        answers=answers,
        save_answers=save_answers,
        num_prompts=num_prompts,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        dtype=dtype,
        min_count=min_count,
        evaluate=evaluate,
    )
    show(partial(tune_ngram, plan), json_output=json_output)
