"""`drafthouse train-draft`: a drafter for a target, made of the target's own answers."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.cli_bench import CategoryField, Json, PromptFile, Target, creatable, show
from cluster.config import BUILTIN_MODEL


def train_draft(  # noqa: PLR0913 - one parameter an option
    *,
    out: Annotated[
        Path, typer.Option(file_okay=False, callback=creatable, help="The drafter's folder.")
    ],
    kind: Annotated[
        Literal["eagle", "medusa", "student"],
        typer.Option(help="Heads on the target's states, or a model of some of its layers."),
    ] = "eagle",
    target: Target = BUILTIN_MODEL,
    prompts: PromptFile = None,
    category_field: CategoryField = "category",
    held_out_every: Annotated[
        int, typer.Option(min=2, help="One prompt in so many of a category is not trained on.")
    ] = 8,
    own_prompts: Annotated[
        bool, typer.Option(help="Have the target write more prompts when these are used up.")
    ] = True,
    begin_from: Annotated[
        str | None, typer.Option(help="student: a small model to train further.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="For answers and training.")] = 30.0,
    max_epochs: Annotated[int, typer.Option(min=1, help="Times an answer is seen.")] = 3,
    dtype: Annotated[
        Literal["float32", "int8", "bfloat16", "float16"],
        typer.Option(help="The target's number format."),
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 16,
    max_prompt_tokens: Annotated[int, typer.Option(min=8, help="Longer ones are left out.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=4, help="Of an answer.")] = 128,
    draft_vocab_size: Annotated[int, typer.Option(min=1, help="Tokens that are learned.")] = 8192,
    num_layers: Annotated[int, typer.Option(min=1, help="student: of the target's.")] = 2,
    num_depths: Annotated[int, typer.Option(min=1, help="Tokens of a draft to train.")] = 3,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1.5e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_output: Json = False,
) -> None:
    """Make a drafter for a target: it answers prompts, and the drafter learns what it would say.

    Half of the time goes into answers. The same command goes on where it was stopped.
    """
    from cluster.tools.training.plan import TrainPlan
    from cluster.tools.training.train import train_draft as train

    plan = TrainPlan(
        target=target,
        kind=kind,
        out=out,
        prompts=prompts,
        category_field=category_field,
        held_out_every=held_out_every,
        own_prompts=own_prompts,
        begin_from=begin_from,
        minutes=minutes,
        max_epochs=max_epochs,
        dtype=dtype,
        device=device,
        concurrency=concurrency,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        draft_vocab_size=draft_vocab_size,
        num_layers=num_layers,
        num_depths=num_depths,
        learning_rate=learning_rate,
        seed=seed,
    )
    show(partial(train, plan), json_output=json_output)
