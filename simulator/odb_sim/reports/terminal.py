"""Terminal output of the commands: tables of figures, cautions, and progress, as a bar if stderr is a terminal.

A table is never cut. If it is wider than the terminal, its header takes several lines. If that is not enough, its columns are
split into blocks, each beginning with the columns that identify a row.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from threading import Event, Thread

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_UNLIMITED = 10_000
_NARROWEST = 8
"""The smallest width to which a column is narrowed; cells that are too long are folded."""


LINE_EVERY_S: float = 30
"""How often progress is printed without a terminal, for example in the log of a job."""


@contextmanager
def show_progress(label: str, total: int, *, is_estimate: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of items done. A ``total`` of 0 means that it is unknown.

    It draws a bar if stderr is a terminal. Otherwise it prints a line every `LINE_EVERY_S` seconds.
    """
    if not sys.stderr.isatty():
        with _print_progress(label, total, "about " if is_estimate else "") as on_progress:
            yield on_progress
        return
    ends = (MofNCompleteColumn(), TimeRemainingColumn()) if total else (TimeElapsedColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *ends)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total or None)
        yield lambda done: progress.update(
            task, completed=done, description=label if total else f"{label}: {done:,} done"
        )


@contextmanager
def _print_progress(label: str, total: int, about: str) -> Iterator[Callable[[int], None]]:
    file, begin_s, ended, done = sys.stderr, time.monotonic(), Event(), 0

    def note(now_done: int) -> None:
        nonlocal done
        done = now_done

    def tell() -> None:
        # In a thread, because a simulation may run for minutes without reporting progress.
        while not ended.wait(LINE_EVERY_S):
            share = f"{done:,} of {about}{total:,} done, " if done < total else f"{done:,} done, " if total else ""
            with suppress(OSError, ValueError):  # without a reader the simulation continues
                print(f"{label}: {share}{time.monotonic() - begin_s:,.0f} s", file=file, flush=True)

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves a broken pipe to the command. rich would exit with status 1, which is a verdict."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_table(title: str, header: list[str], rows: list[list[str]], *, keys: int = 1) -> None:
    """Prints a table on stdout, the first column aligned left and the others right, and never cut off.

    The first ``keys`` columns identify a row. They are repeated in each block if the table is too wide for the terminal.
    """
    console = _Console(width=None if sys.stdout.isatty() else _UNLIMITED, highlight=False)
    console.print(title, soft_wrap=True, markup=False)
    for columns in _split_columns(console, header, rows, keys):
        console.print(_build(console, columns, header, rows), crop=False)


def print_cautions(lines: Sequence[str]) -> None:
    """Prints a line for each fact that the figures do not show by themselves."""
    for line in lines:
        print(f"Caution: {line}.")  # noqa: T201


def _split_columns(console: Console, header: list[str], rows: list[list[str]], keys: int) -> list[list[int]]:
    """Returns the columns of each block: a single block if the table fits the terminal, otherwise blocks that fit."""
    names, blocks = list(range(keys)), [list(range(len(header)))]
    if _measure(console, blocks[0], header, rows) <= console.width or len(header) <= keys + 1:
        return blocks
    blocks = [[*names, keys]]
    for column in range(keys + 1, len(header)):
        if _measure(console, [*blocks[-1], column], header, rows) <= console.width:
            blocks[-1].append(column)
        else:
            blocks.append([*names, column])
    return blocks


def _measure(console: Console, columns: list[int], header: list[str], rows: list[list[str]]) -> int:
    table = _make(columns, [_wrap(header[column], _compute_width(column, rows)) for column in columns], rows)
    return Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum


def _build(console: Console, columns: list[int], header: list[str], rows: list[list[str]]) -> Table:
    table = _make(columns, [header[column] for column in columns], rows)
    if Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum <= console.width:
        return table
    table = _make(columns, [_wrap(header[column], _compute_width(column, rows)) for column in columns], rows)
    excess = _measure(console, columns, header, rows) - console.width
    # A single column, such as a path, can be too wide. The widest column shrinks, as long as one can.
    while excess > 0:
        widest = max(table.columns, key=lambda column: column.width or 0)
        if (widest.width or 0) <= _NARROWEST:
            for column in table.columns:
                column.width, column.no_wrap, column.overflow = None, False, "fold"
            break
        give = min(excess, (widest.width or 0) - _NARROWEST)
        widest.width = (widest.width or 0) - give
        widest.no_wrap, widest.overflow = False, "fold"
        excess -= give
    return table


def _make(columns: list[int], names: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, name in zip(columns, names, strict=True):
        width = max(map(cell_len, (*name.split("\n"), *(row[column] for row in rows))))
        table.add_column(name, justify="left" if column == 0 else "right", no_wrap=True, width=width)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _compute_width(column: int, rows: list[list[str]]) -> int:
    return max((cell_len(row[column]) for row in rows), default=0)


def _wrap(name: str, width: int) -> str:
    """Returns the words of a heading in lines no longer than ``width`` or its longest word."""
    words = name.split(" ")
    width = max(width, *map(cell_len, words))
    lines = [words[0]]
    for _, word in pairwise(words):
        if cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)
