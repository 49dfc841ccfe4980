"""What the commands show: a table of figures, and a progress bar where there is a terminal to draw it on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@contextmanager
def show_progress(label: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A function to be told how many of ``total`` are done, or None when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table on stdout: the first column to the left, the others to the right; never cut off."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 10_000
    console = Console(width=width, highlight=False)
    console.print(title, soft_wrap=True, markup=False)
    console.print(table, crop=False)
