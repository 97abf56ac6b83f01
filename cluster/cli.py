"""The `drafthouse` command. Each command imports what it needs when it runs, and nothing more."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cluster.cli_bench import bench, validate
from cluster.cli_choose import advise, compare_drafts, rollout
from cluster.cli_control import control, profile
from cluster.cli_drafts import swap_draft
from cluster.cli_drill import drill, soak
from cluster.cli_keys import keys
from cluster.cli_serve import serve
from cluster.cli_simulate import simulate
from cluster.cli_train import train_draft
from cluster.cli_tune import tune
from cluster.config import (
    BUILTIN_MODEL,
    DrafthouseConfig,
    SpeculationConfig,
    TargetConfig,
    drafter_from_flag,
    environment,
    parse_config,
    speculation_from_flag,
)
from cluster.errors import ConfigurationError, DrafthouseError
from cluster.request import Grammar, GrammarKind

app = typer.Typer(
    name="drafthouse",
    help="Speculative decoding on Ray: lossless, and never slower than plain decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(validate)
app.command()(profile)
app.command()(simulate)
app.command()(advise)
app.command("compare-drafts")(compare_drafts)
app.command()(rollout)
app.command()(drill)
app.command()(soak)
app.command("swap-draft")(swap_draft)
app.command("train-draft")(train_draft)
bench.command()(control)
app.add_typer(bench, name="bench")
app.add_typer(tune, name="tune")
app.add_typer(keys, name="keys")
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Target = Annotated[str, typer.Option(help="Hugging Face id, folder, .gguf file or built-in name.")]
Draft = Annotated[str, typer.Option(help="off, ngram, ngram:TABLE, a model REF, or ngram+REF.")]
NumSpeculativeTokens = Annotated[
    str, typer.Option(metavar="K|auto", help="Drafts per step: always K, or as many as pay.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1)]
Temperature = Annotated[float | None, typer.Option(min=0.0)]
Seed = Annotated[int | None, typer.Option(min=0)]
JsonSchema = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A schema the answer keeps to.")
]
Regex = Annotated[str | None, typer.Option(help="What the whole answer matches.")]
PemFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def generate(  # noqa: PLR0913 - one parameter an option
    prompt: str,
    *,
    target: Target = BUILTIN_MODEL,
    draft: Draft = "ngram",
    num_speculative_tokens: NumSpeculativeTokens = "auto",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    json_output: Json = False,
) -> None:
    """Answer one prompt in this process, without Ray."""
    from cluster.drafters.heads.kinds import kind_of
    from cluster.tools.generate import Prompt
    from cluster.tools.generate import generate as answer_prompt

    config = DrafthouseConfig(
        name=target,
        target=TargetConfig(model=target, max_num_seqs=1),
        drafter=drafter_from_flag(draft, kind_of=kind_of, placement="in_process"),
        speculation=_speculation(num_speculative_tokens),
    )
    what = Prompt(
        text=prompt,
        raw=raw,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        grammar=_grammar(json_schema, regex),
    )

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
        f"ended by {answer.finish_reason}, seed {answer.seed}[/dim]",
        soft_wrap=True,
    )


@app.command()
def chat(  # noqa: PLR0913 - one parameter an option
    *,
    address: Annotated[str, typer.Option(help="HOST:PORT of a server.")] = "127.0.0.1:50051",
    once: Annotated[str | None, typer.Option(help="Ask this, then end.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    show_drafts: Annotated[bool, typer.Option(help="Accepted drafts in another colour.")] = True,
    json_output: Json = False,
    tls: Annotated[bool, typer.Option("--tls", help="With the system's authorities.")] = False,
    tls_ca: PemFile = None,
    client_cert: PemFile = None,
    client_key: PemFile = None,
    api_key: Annotated[
        str | None, typer.Option(help="Better in the environment: DRAFTHOUSE_API_KEY.")
    ] = None,
) -> None:
    """Talk to a server: one line a turn, until the input ends."""
    environment.prepare_grpc_environment()
    from cluster.tools.chat import AnswerOptions
    from cluster.tools.chat import chat as talk
    from cluster.tools.connection import Access

    options = AnswerOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        grammar=_grammar(json_schema, regex),
    )
    access = Access(
        tls=tls,
        tls_ca=tls_ca,
        client_certificate=client_cert,
        client_key=client_key,
        api_key=api_key or environment.api_key(),
    )
    talk(
        address,
        once=once,
        json_output=json_output,
        show_drafts=show_drafts,
        options=options,
        access=access,
    )


@app.command()
def fields(
    *, openai: Annotated[bool, typer.Option("--openai", help="Those of OpenAI's HTTP API.")] = False
) -> None:
    """Every field of a request and how it is served, as a table in Markdown."""
    from cluster.tools.fields import fields_table
    from cluster.tools.openai_fields import openai_fields_table

    console.out(openai_fields_table() if openai else fields_table(), highlight=False)


def _speculation(num_speculative_tokens: str) -> SpeculationConfig:
    """For one answer in this process: nothing is timed before it begins."""
    fields = speculation_from_flag(num_speculative_tokens)
    return parse_config({"speculation": fields | {"profile": False}}).speculation


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """What the answer has to match, by at most one of the options."""
    if json_schema is not None and regex is not None:
        raise typer.BadParameter("--json-schema and --regex exclude each other")
    if json_schema is not None:
        try:
            return Grammar(GrammarKind.JSON_SCHEMA, json_schema.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--json-schema: {json_schema}: {error}") from None
    return None if regex is None else Grammar(GrammarKind.REGEX, regex)


def one_line(error: DrafthouseError) -> Text:
    """What a terminal shows of an error, whose words may be another program's, and many."""
    return Text.assemble(("error:", "red"), " ", " ".join(str(error).split()))


def main() -> None:
    """Run the command line; a deliberate error is one line, without a stack trace."""
    environment.prepare_torch_environment()
    try:
        app()
    except DrafthouseError as error:
        errors.print(one_line(error), soft_wrap=True)
        sys.exit(2)
