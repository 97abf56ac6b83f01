"""`drafthouse keys`: who may ask, and how much."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

keys = typer.Typer(help="API keys: created, listed and revoked in a file.", no_args_is_help=True)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

File = Annotated[Path, typer.Option("--file", "-f", help="The file that gateway.keys names.")]
KEYS_FILE = Path("keys.yaml")
COLUMNS = ("tenant", "state", "models", "limits", "priority", "weight", "expires")


@keys.command()
def create(  # noqa: PLR0913 - one parameter an option
    tenant: str,
    *,
    file: File = KEYS_FILE,
    model: Annotated[
        list[str] | None, typer.Option(help="A model it may ask; several times for several.")
    ] = None,
    concurrent_requests: Annotated[int | None, typer.Option(min=1)] = None,
    requests_per_minute: Annotated[float | None, typer.Option(min=0)] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(min=0, help="Rows of the target: prompt, answer and drafts.")
    ] = None,
    priority: Annotated[int, typer.Option(help="Added to its requests' own.")] = 0,
    weight: Annotated[float, typer.Option(help="Its share beside other tenants that wait.")] = 1.0,
    expires_days: Annotated[float | None, typer.Option(min=0)] = None,
) -> None:
    """Make a key for a tenant and print it: it is shown this once, and kept nowhere."""
    from cluster.tools.keys import KeyOptions, create_key

    options = KeyOptions(
        models=tuple(model or ()),
        concurrent_requests=concurrent_requests,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        priority=priority,
        weight=weight,
        expires_days=expires_days,
    )
    console.out(create_key(file, tenant, options), highlight=False)
    errors.print(
        f"added to {file}; it is not shown again", style="dim", markup=False, soft_wrap=True
    )


@keys.command(name="list")
def list_(
    *,
    file: File = KEYS_FILE,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Every key's id, tenant and limits; the keys themselves are not known."""
    from cluster.tools.keys import list_keys

    found = list_keys(file)
    if json_output:
        console.out(json.dumps(found), highlight=False)
        return
    columns = [Column(name, overflow="fold") for name in COLUMNS]
    table = Table(Column("id", no_wrap=True), *columns)
    for key in found:
        limits = key["limits"]
        assert isinstance(limits, dict)
        models = key["models"]
        assert isinstance(models, list)
        table.add_row(
            str(key["id"]),
            str(key["tenant"]),
            str(key["state"]),
            ", ".join(models) or "all",
            ", ".join(f"{name} {value:g}" for name, value in limits.items()) or "none",
            str(key["priority"]),
            str(key["weight"]),
            str(key["expires"] or "never"),
        )
    console.print(table)


@keys.command()
def revoke(key_id: str, *, file: File = KEYS_FILE) -> None:
    """Make a key invalid for good; running gateways know within seconds."""
    from cluster.tools.keys import revoke_key

    revoke_key(file, key_id)
    errors.print(f"{key_id} is revoked", style="dim", markup=False, soft_wrap=True)
