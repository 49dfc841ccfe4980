"""Figures of several repetitions, and tables to print them in."""

from __future__ import annotations

import statistics
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

    def to_json(self) -> dict[str, float]:
        return {"min": self.least, "median": self.median, "max": self.greatest}


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


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table in plain text. The first column is left-aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())
