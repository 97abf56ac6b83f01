"""The `drafthouse` command. Each command imports what it needs when it runs, and nothing more."""

import asyncio
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli_serve import serve
from cluster.config import (
    BUILTIN_MODEL,
    DrafthouseConfig,
    SpeculationConfig,
    TargetConfig,
    drafter_from_flag,
)
from cluster.errors import DrafthouseError

app = typer.Typer(
    name="drafthouse",
    help="Speculative decoding on Ray: lossless, and never slower than plain decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Target = Annotated[str, typer.Option(help="Hugging Face id, folder, .gguf file or built-in name.")]
Draft = Annotated[str, typer.Option(help="ngram, off, or a model reference.")]
NumSpeculativeTokens = Annotated[int, typer.Option(min=0, max=64, help="Drafts per step.")]
MaxTokens = Annotated[int | None, typer.Option(min=1)]
Temperature = Annotated[float | None, typer.Option(min=0.0)]
Seed = Annotated[int | None, typer.Option(min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def generate(  # noqa: PLR0913 - one parameter an option
    prompt: str,
    *,
    target: Target = BUILTIN_MODEL,
    draft: Draft = "ngram",
    num_speculative_tokens: NumSpeculativeTokens = 4,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    json_output: Json = False,
) -> None:
    """Answer one prompt in this process, without Ray."""
    from cluster.tools.generate import Prompt
    from cluster.tools.generate import generate as answer_prompt

    config = DrafthouseConfig(
        name=target,
        target=TargetConfig(model=target, max_num_seqs=1),
        drafter=drafter_from_flag(draft, placement="in_process"),
        speculation=SpeculationConfig(num_speculative_tokens=num_speculative_tokens),
    )
    what = Prompt(text=prompt, raw=raw, max_tokens=max_tokens, temperature=temperature, seed=seed)

    def show(text: str) -> None:
        if not json_output:
            console.out(text, end="")

    answer = asyncio.run(answer_prompt(config, what, show=lambda delta: show(delta.text)))
    if json_output:
        console.print_json(json.dumps(answer.as_json()))
        return
    console.print()
    errors.print(
        f"[dim]{len(answer.token_ids)} tokens in {answer.num_steps} steps, "
        f"{answer.num_accepted} of {answer.num_drafted} drafts accepted, "
        f"ended by {answer.finish_reason}, seed {answer.seed}[/dim]"
    )


@app.command()
def chat(
    *,
    address: Annotated[str, typer.Option(help="HOST:PORT of a server.")] = "127.0.0.1:50051",
    once: Annotated[str | None, typer.Option(help="Ask this, then end.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    show_drafts: Annotated[bool, typer.Option(help="Accepted drafts in another colour.")] = True,
    json_output: Json = False,
) -> None:
    """Talk to a server: one line a turn, until the input ends."""
    from cluster.tools.chat import AnswerOptions
    from cluster.tools.chat import chat as talk

    options = AnswerOptions(max_tokens=max_tokens, temperature=temperature, seed=seed)
    talk(address, once=once, json_output=json_output, show_drafts=show_drafts, options=options)


@app.command()
def bench(
    *,
    target: Target = BUILTIN_MODEL,
    json_output: Json = False,
) -> None:
    """Measure this machine: steps, decoding, speculation, and the whole cluster over gRPC."""
    from cluster.tools.bench.run import run_bench

    report = run_bench(target, progress=lambda text: errors.print(f"[dim]{text}[/dim]"))
    if json_output:
        console.print_json(json.dumps(report.as_json()))
    else:
        console.print(report)


def main() -> None:
    """Run the command line; a deliberate error is one line, without a stack trace."""
    try:
        app()
    except DrafthouseError as error:
        errors.print(f"[red]error:[/red] {error}")
        sys.exit(2)
