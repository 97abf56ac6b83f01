"""How far a benchmark is, for whoever waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Takes what is being measured and how much of it is done: `done` of `total`, from 0 on."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Note it; never blocks."""
        ...


def silent(what: str, done: int, total: int) -> None:
    """Takes it and says nothing."""


@contextmanager
def bars(console: Console, *, shown: bool) -> Iterator[Report]:
    """A bar for each thing measured, while the block runs; nothing where no person looks."""
    if not shown or not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield report
