"""`drafthouse advise`, `compare-drafts` and `rollout`: which drafts, and whether to go on."""

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli_bench import (
    CategoryField,
    Json,
    PromptFile,
    Rounds,
    Target,
    creatable,
    dtypes,
    numbers,
    show,
    values,
)
from cluster.config import BUILTIN_MODEL, environment, load_config
from cluster.tools.bench.progress import Report

if TYPE_CHECKING:
    from cluster.tools.connection import Access

Tls = Annotated[bool, typer.Option("--tls", help="With the system's authorities.")]
PemFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM.")]
ApiKey = Annotated[str | None, typer.Option(help="Better in the environment: DRAFTHOUSE_API_KEY.")]


def advise(  # noqa: PLR0913 - one parameter an option
    *,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A server's HTTP, which is watched.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="As for serve.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="To watch the server for.")] = 10.0,
    tls: Tls = False,
    tls_ca: PemFile = None,
    client_cert: PemFile = None,
    client_key: PemFile = None,
    api_key: ApiKey = None,
    json_output: Json = False,
) -> None:
    """Say whether to speculate, how deep, where to place drafts and how many, and why.

    From a live server, from a configuration with the profile that was stored for it, or both.
    """
    from cluster.tools.choosing.advice import Advice, advise
    from cluster.tools.choosing.configured import configured_facts, joined
    from cluster.tools.choosing.telemetry import facts_of, watch

    if address is None and config is None:
        raise typer.BadParameter("--address HOST:PORT, --config FILE, or both")
    access = _access(tls, tls_ca, client_cert, client_key, api_key)

    def find_out(report: Report) -> Advice:
        planned = None if config is None else configured_facts(load_config(config))
        if address is None:
            assert planned is not None, "one of the two was given"
            return advise(planned)
        live = facts_of(watch(address, access=access, seconds=seconds, report=report))
        return advise(live if planned is None else joined(live, planned))

    async def run(*, report: Report) -> Advice:
        return await asyncio.to_thread(find_out, report)

    show(run, json_output=json_output)


def compare_drafts(  # noqa: PLR0913 - one parameter an option
    *,
    draft: Annotated[
        list[str], typer.Option(help="ngram, a model or head REF, or ngram+REF; several.")
    ],
    target: Target = BUILTIN_MODEL,
    prompts: PromptFile = None,
    category_field: CategoryField = "category",
    num_speculative_tokens: Annotated[
        list[str] | None, typer.Option(help="Drafts per step, 4 if not given; several.")
    ] = None,
    concurrency: Annotated[
        list[str] | None, typer.Option(help="Requests at once, 1,4,8 if not given; several.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format of target and drafts.")] = "float32",
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of all categories in turn.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    rounds: Rounds = 3,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report", dir_okay=False, callback=creatable, help="Write an HTML page there."
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Compare drafts for a target: what is kept by category and position, costs, and speed-ups.

    Each speed-up is predicted from the cost table and measured, in the same run. Says which draft
    to take and where each stops paying. Ends with 1 when none of them fits.
    """
    from cluster.tools.bench.workloads import by_category
    from cluster.tools.choosing.compare import compare_drafts as compare
    from cluster.tools.choosing.compare_plan import ComparePlan
    from cluster.tools.choosing.comparison_page import write_page

    [number_format] = dtypes([dtype])
    plan = ComparePlan(
        target=target,
        drafts=values(draft, ""),
        prompts=by_category(prompts, category_field=category_field),
        num_speculative_tokens=numbers(
            num_speculative_tokens, 4, option="--num-speculative-tokens", least=1
        ),
        concurrencies=numbers(concurrency or ["1,4,8"], 1, option="--concurrency", least=1),
        dtype=number_format,
        max_tokens=max_tokens,
        num_prompts=num_prompts,
        temperature=temperature,
        rounds=rounds,
    )
    found = show(partial(compare, plan), json_output=json_output)
    if page is not None:
        write_page(found, page)
    if not found.measured:
        raise typer.Exit(1)


def rollout(  # noqa: PLR0913 - one parameter an option
    *,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="A server's gRPC.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON lines with turns, prompt or messages; the built-in ones if not given.",
        ),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Of the requests that speculate, 0.1 and then 0.5; several."),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=2, help="Of each share.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    max_drafts: Annotated[
        int | None, typer.Option(min=1, help="Per step; the server's own choice if not given.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Part of the time between tokens that may be lost.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of which requests speculate.")] = 0,
    tls: Tls = False,
    tls_ca: PemFile = None,
    client_cert: PemFile = None,
    client_key: PemFile = None,
    api_key: ApiKey = None,
    json_output: Json = False,
) -> None:
    """Let a share of the requests to a live server speculate, compare, and promote or return.

    Ends with 0 to promote and with 1 to return: something was shown to be worse, or the requests
    were too few to show that nothing is.
    """
    from cluster.tools.bench.workloads import by_category
    from cluster.tools.choosing.canary import Decision
    from cluster.tools.choosing.rollout import RolloutPlan, run_rollout

    categories = by_category(prompts, category_field="category")
    plan = RolloutPlan(
        address=address,
        prompts=[prompt for its in categories.values() for prompt in its],
        shares=share or (0.1, 0.5),
        num_requests=num_requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        max_drafts=max_drafts,
        tolerance=tolerance,
        seed=seed,
        access=_access(tls, tls_ca, client_cert, client_key, api_key),
    )
    found = show(partial(run_rollout, plan), json_output=json_output)
    if found.decision is not Decision.PROMOTE:
        raise typer.Exit(1)


def _access(
    tls: bool,  # noqa: FBT001 - as typer hands it over
    tls_ca: Path | None,
    client_cert: Path | None,
    client_key: Path | None,
    api_key: str | None,
) -> "Access":
    """How a server is reached."""
    from cluster.tools.connection import Access

    return Access(
        tls=tls,
        tls_ca=tls_ca,
        client_certificate=client_cert,
        client_key=client_key,
        api_key=api_key or environment.api_key(),
    )
