"""`drafthouse swap-draft`: new weights for a draft pool while it serves."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.config import prepare_ray_environment


def swap_draft(
    pool: Annotated[str, typer.Argument(help="The draft pool's name, or its model reference.")],
    folder: Annotated[str, typer.Argument(help="Folder or reference of the new weights.")],
    *,
    address: Annotated[str, typer.Option(help="The Ray cluster that serves.")] = "auto",
) -> None:
    """Have a draft pool try other weights of its model: no token changes, only the speed.

    They stay if as many drafts are accepted as before; else the pool returns to the old ones.
    """
    prepare_ray_environment(joining=True)
    from cluster.actors.visit import ask_router, visited_ray

    path = Path(folder).expanduser()
    reference = str(path.resolve()) if path.exists() else folder
    with visited_ray(address) as node_id:
        version: int = ask_router("swap_draft", pool, reference, node_id)
    Console().print(f"draft pool {pool} drafts with {folder} as version {version}", highlight=False)
