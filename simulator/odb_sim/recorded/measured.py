"""The cost of a step from a table of measurements: a CSV file of a few steps timed by hand.

Columns: ``seconds``, and the padded ``tokens`` of a batch, or its ``rows`` and ``longest``. Two sizes are enough for the fixed
cost of a step and the cost per token. Four sizes also give the least time of a step, if there is one, and with rows of three or
more lengths the cost of attention.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Final

import numpy as np

from odb_ref.core.errors import UsageError, check_integer
from odb_sim.inputs.costs import LARGEST_S, NO_COLLECTIVE, Costs, FittedTo, GpuCost
from odb_sim.recorded.calibrate import Calibration, list_ranges
from odb_sim.recorded.fitting import Matrix, Range, TimedSpans, bound_errors, compute_ranges, fit_with_floor, judge

TOKENS: Final = "tokens"
_LARGEST: Final = 2**53
_GAIN: Final = 0.9
_FEWEST_DRAWN: Final = 6
"""With fewer measurements the numbers have no ranges of their own, only the error of the whole."""
ASSUMED_ERROR: Final = 0.1
_FEWEST_LENGTHS: Final = 3


def calibrate_table(path: str | Path, ranks: int = 1) -> Calibration:
    """Returns the cost of a step that fits a table best. The steps were measured on ``ranks`` ranks, and include their
    collective.

    The error of each measurement is that of a fit to the others.

    Raises: UsageError, naming file and line, when it holds anything but measurements, those of one size only, or times that do
    not grow with the tokens.
    """
    check_integer(ranks, "--ranks", 1)
    spans, has_lengths = _read(Path(path))
    sizes = len(np.unique(spans.columns, axis=0))
    if len(np.unique(spans.columns[:, 1])) < 2:
        raise UsageError(f"{path}: all steps have {spans.columns[0, 1]:,.0f} tokens; two sizes are enough, one is not")
    names = ("fixed_s", "per_token_s")
    linear = chosen = spans.keep(names)
    if has_lengths and sizes > _FEWEST_LENGTHS:
        # Kept only if it predicts measurements better to which it was not fitted.
        is_better = np.abs(_leave_out(spans)).sum() < _GAIN * np.abs(_leave_out(linear)).sum()
        chosen = spans if is_better else linear
    values = fit_with_floor(chosen)
    if not values["per_token_s"] and not values.get("per_token2_s"):
        raise UsageError(f"{path}: steps with more tokens do not take longer: are rows mixed up?")
    is_judged = sizes > len(values)
    errors = _leave_out(chosen) if is_judged else chosen.compute_errors(values)
    run_error = bound_errors((errors / chosen.seconds).tolist())
    fit = replace(
        judge("step", values, chosen, chosen, errors * is_judged),
        spans_held=len(chosen) if is_judged else 0,
        run_error=run_error if is_judged else max(ASSUMED_ERROR, run_error),  # a size may be measured twice
        ranges=compute_ranges(chosen, fit_with_floor) if len(chosen) >= _FEWEST_DRAWN and is_judged else (),
    )
    if not fit.ranges:
        fit = replace(fit, ranges=tuple(Range(name, value, value) for name, value in values.items()))
    costs = Costs(
        gpu=replace(GpuCost(fixed_s=0, per_token_s=0, per_token2_s=0), **values),
        collective=NO_COLLECTIVE,
        fitted=FittedTo(
            ranks=ranks,
            padded_tokens=int(spans.columns[:, 1].max()),
            longest=round((spans.columns[:, 2] / spans.columns[:, 1]).max()),
        ),
        ranges=list_ranges([fit]),
    )
    held_back = (
        "each measurement in turn" if is_judged else "none: two sizes make a line, and leave nothing to judge it by"
    )
    return Calibration(costs, (fit,), held_back)


def _leave_out(spans: TimedSpans) -> Matrix:
    """Returns the error of each measurement in a fit to those of other sizes."""
    errors = np.zeros(len(spans))
    _, groups = np.unique(spans.columns, axis=0, return_inverse=True)
    for group in range(int(groups.max()) + 1):
        inside = np.flatnonzero(groups.ravel() == group)
        others = np.flatnonzero(groups.ravel() != group)
        errors[inside] = spans.select(inside).compute_errors(fit_with_floor(spans.select(others)))
    return errors


def _read(path: Path) -> tuple[TimedSpans, bool]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            for column in ("seconds", TOKENS, "rows", "longest"):
                if header.count(column) > 1:
                    raise UsageError(f"{path}:1: {header.count(column)} columns are called {column}")
            has_lengths = {"rows", "longest"} <= set(header)
            if "seconds" not in header or not (has_lengths or TOKENS in header):
                raise UsageError(f"{path}:1: a table of steps has the columns seconds, and tokens, or rows and longest")
            found = [_read_row(f"{path}:{reader.line_num}", row, has_lengths=has_lengths) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not found:
        raise UsageError(f"{path}: no measurement in it")
    tokens, pairs, seconds = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
    columns = np.stack([np.ones(len(found)), tokens, pairs], axis=1)
    return TimedSpans(("fixed_s", "per_token_s", "per_token2_s"), columns, seconds), has_lengths


def _read_row(where: str, row: Mapping[str, str | None], *, has_lengths: bool) -> tuple[float, float, float]:
    def read(name: str) -> float:
        text = row.get(name) or ""
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        most = LARGEST_S if name == "seconds" else _LARGEST
        if not isfinite(value) or not 0 < value <= most or (name != "seconds" and value != int(value)):
            raise UsageError(f"{where}: {name} is {text!r:.40}, expected a number of more than 0")
        return value

    seconds = read("seconds")
    if has_lengths:
        rows, longest = read("rows"), read("longest")
        if row.get(TOKENS) and (tokens := read(TOKENS)) != rows * longest:
            raise UsageError(
                f"{where}: {tokens:,.0f} tokens, and rows times longest are {rows * longest:,.0f}: leave one out"
            )
        return rows * longest, rows * longest**2, seconds
    return read(TOKENS), 0.0, seconds
