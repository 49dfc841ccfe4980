"""What the commands show: tables of figures, cautions, and progress: a bar where there is a terminal to draw it on.

A table is never cut. Where it is wider than the terminal its header goes over several lines, then its columns go into several
blocks, each beginning with the columns that say what a row is.
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
"""A cell that is too long for the terminal is folded, at this width or more."""


LINE_EVERY_S: float = 30
"""How often progress is said where there is no terminal: in a log of a job, say."""


@contextmanager
def show_progress(label: str, total: int, *, is_estimate: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function to be told how many of ``total`` are done; a total of 0 is not known.

    It draws a bar where stderr is a terminal, else it prints a line now and then, the first after `LINE_EVERY_S`.
    """
    if not sys.stderr.isatty():
        with _print_progress(label, total, "about " if is_estimate else "") as on_progress:
            yield on_progress
        return
    ends = (MofNCompleteColumn(), TimeRemainingColumn()) if total else (TimeElapsedColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *ends)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total or None)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _print_progress(label: str, total: int, about: str) -> Iterator[Callable[[int], None]]:
    file, begin_s, ended, done = sys.stderr, time.monotonic(), Event(), 0

    def note(now_done: int) -> None:
        nonlocal done
        done = now_done

    def tell() -> None:
        # A thread, since nothing is heard of a simulation of minutes before its end.
        while not ended.wait(LINE_EVERY_S):
            share = f"{done:,} of {about}{total:,} done, " if done < total else f"{done:,} done, " if total else ""
            with suppress(OSError, ValueError):  # nobody reads it: no reason to end
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
        """Leaves it to the command what is done when nobody reads on; rich would end it with status 1, a verdict."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_table(title: str, header: list[str], rows: list[list[str]], *, keys: int = 1) -> None:
    """Prints a table on stdout: the first column to the left, the others to the right; never cut off.

    The first ``keys`` columns say what a row is: they are repeated where a table is too wide for the terminal.
    """
    console = _Console(width=None if sys.stdout.isatty() else _UNLIMITED, highlight=False)
    console.print(title, soft_wrap=True, markup=False)
    for columns in _split_columns(console, header, rows, keys):
        console.print(_build(console, columns, header, rows), crop=False)


def print_cautions(lines: Sequence[str]) -> None:
    """Prints a line for each thing that the figures do not show by themselves."""
    for line in lines:
        print(f"Caution: {line}.")  # noqa: T201


def _split_columns(console: Console, header: list[str], rows: list[list[str]], keys: int) -> list[list[int]]:
    """Returns the columns of each block: one block where all fit the terminal, else what fits in each."""
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
    # A column that alone is too wide: a path, say. The widest gives way, as long as there is one that can.
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
    """Returns the words of a heading on lines no longer than ``width``, or than its longest word."""
    words = name.split(" ")
    width = max(width, *map(cell_len, words))
    lines = [words[0]]
    for _, word in pairwise(words):
        if cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)
