"""Figures of several repetitions, progress, and tables."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """The minimum, the median and the maximum of several measurements."""

    least: float
    median: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Returns the spread of at least one value."""
        found = sorted(values)
        return cls(found[0], statistics.median(found), found[-1])

    def __str__(self) -> str:
        if self.least == self.greatest:
            return format_number(self.median)
        return f"{format_number(self.median)} ({format_number(self.least)} to {format_number(self.greatest)})"


def compute_ratios(ours: Sequence[float], others: Sequence[float]) -> Spread | None:
    """Returns the ratio for each repetition, in which both were measured one after the other, under the same load."""
    ratios = [mine / other for mine, other in zip(ours, others, strict=False) if other]
    return Spread.of(ratios) if ratios else None


def format_number(value: float) -> str:
    """Returns three digits, or more if the number is an integer."""
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def has_failures(jobs: Iterable[Mapping[str, Any]]) -> bool:
    """Prints the errors of jobs that ended with one, see `Rank.found`."""
    errors = [job["error"] for job in jobs if "error" in job]
    for error in errors:
        print(f"  a job failed: {error}")
    return bool(errors)


def say(text: str) -> None:
    """Prints a line of progress, on a terminal only, in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def print_table(title: str, header: Sequence[str], table: Iterable[Sequence[object]]) -> None:
    """Prints a table in plain text, in place of the progress. The first column is left-aligned. None is a dash."""
    say("")
    rows = [["-" if cell is None else str(cell) for cell in row] for row in table]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())
