"""``odb-ref lengths``: the lengths of a data set of texts, as the CSV file that every other command reads."""

from __future__ import annotations

import argparse
import shlex
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Final

import numpy as np

from odb_ref.core.errors import UsageError
from odb_sim.cli.options import add_number, add_processes, add_repeated, add_text
from odb_sim.inputs.files import check_files, write_csv, write_json
from odb_sim.inputs.lengths import LARGEST_LENGTH, SUPERVISED_COLUMN, TOTAL_COLUMN, Integers, Lengths
from odb_sim.inputs.texts import FORMATS, Row, count_rows, read_rows
from odb_sim.inputs.tokens import CHATML, NO_TEMPLATE, CountedRow, RowReading, load_tokenizer, measure
from odb_sim.reports.terminal import print_cautions, print_table, show_progress
from odb_sim.studies.processes import make_executor

_CHUNK_ROWS: Final = 256
_AHEAD: Final = 4
"""The number of chunks for each process that are read ahead."""
_BINS: Final = 12
_BAR: Final = 40
_HEADER: Final = ["tokens from", "to", "samples", "share of tokens", "histogram"]

Numbered = tuple[str, Row]


@dataclass(slots=True)
class Found:
    """The lengths found so far."""

    total: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    cut: int = 0
    approximate: int = 0
    empty: int = 0

    def add(self, parts: Sequence[CountedRow]) -> None:
        """Adds the lengths of some rows."""
        self.total += [part.total for part in parts]
        self.supervised += [part.supervised for part in parts]
        self.cut += sum(part.is_cut for part in parts)
        self.approximate += sum(part.is_approximate for part in parts)
        self.empty += sum(part.is_empty for part in parts)


HELP: Final = "count the tokens of a data set, as input for all other commands"
DESCRIPTION: Final = (
    "Tokenizes a data set as a trainer would, and writes how many tokens each sample has, and how many "
    f"of them carry loss: a CSV file with {TOTAL_COLUMN} and {SUPERVISED_COLUMN}, without any text. Needs the extra "
    "[data]."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("data", metavar="DATA", help=FORMATS)
    add_reading_options(parser)
    text = "a column to keep beside the lengths: as it is if it holds only whole numbers, else its values are numbered"
    add_repeated(parser, "--keep", "COLUMN", text)
    parser.add_argument("--out", metavar="FILE", help="the CSV file to write")
    parser.add_argument("--json", metavar="FILE", help="write the summary and the histogram")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `build_reading` reads."""
    add_text(parser, "--tokenizer", "T", "a tokenizer.json (.gz), a folder that has one, or a name on the hub")
    own = f"(default: the tokenizer's own, or {CHATML} if it has the tokens for it)"
    add_text(parser, "--template", "FILE", f"the chat template: a Jinja file, {CHATML}, or {NO_TEMPLATE} {own}")
    text = (
        "column of conversations or texts; given twice, of prompts and of responses; input_ids for tokenized data "
        "(default: the usual names)"
    )
    parser.add_argument("--column", action="append", default=[], metavar="COLUMN", help=text)
    add_number(parser, "--max-length", "N", "cut samples to this many tokens (default: no cut)")
    parser.add_argument("--split", metavar="NAME", help="split of a saved data set that has several")
    add_processes(parser, "processes that tokenize")


def build_reading(options: argparse.Namespace) -> RowReading:
    """Returns how to read rows, according to the options. Raises: UsageError when they make no sense."""
    if options.max_length is not None and options.max_length < 1:
        raise UsageError(f"--max-length must be at least 1, got {options.max_length}")
    return RowReading(
        tokenizer=options.tokenizer,
        template=options.template,
        columns=tuple(options.column),
        max_tokens=options.max_length,
    )


def describe_reading(options: argparse.Namespace) -> str:
    """Returns the options of `add_reading_options` that affect the lengths, quoted for a shell."""
    given = [("--tokenizer", options.tokenizer), ("--template", options.template), ("--max-length", options.max_length)]
    given += [*(("--column", column) for column in options.column), ("--split", options.split)]
    return shlex.join(str(word) for flag, value in given if value is not None for word in (flag, value))


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    check_files(options.out, options.json, reads=[options.data, options.tokenizer, options.template])
    names = [TOTAL_COLUMN, SUPERVISED_COLUMN, *options.keep]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--keep {twice}: the file already has a column of that name")
    found = read_lengths(options, options.keep)
    lengths = make_lengths(options.data, found)
    if options.out is not None:
        columns = [found.total, found.supervised, *found.kept]
        write_csv(options.out, [names, *map(list, zip(*columns, strict=True))])
    summary, bins = summarize(lengths), make_bins(lengths.tokens)
    if options.json is not None:
        keys = ("low", "high", "samples", "token_share")
        write_json(
            options.json,
            {
                **summary,
                "cut": found.cut,
                "empty": found.empty,
                "bins": [dict(zip(keys, bin_, strict=True)) for bin_ in bins],
            },
        )
    print_lengths(lengths, found)
    if options.out is None:
        print("Nothing is written: pass --out lengths.csv, a file for all other commands.")
    return 0


def read_lengths(options: argparse.Namespace, keep: Sequence[str] = ()) -> Found:
    """Returns the lengths of all rows, tokenized by several processes, with a progress bar.

    Raises: UsageError when the data or the tokenizer cannot be read, naming file and row.
    """
    reading, found = build_reading(options), Found(kept=[[] for _ in keep])
    numbers: list[dict[int | str, int]] = [{} for _ in keep]
    rows = read_rows(options.data, options.split)
    first = list(islice(rows, 1))  # reports missing data before a tokenizer is looked up on the hub
    if not first:
        raise UsageError(f"{options.data}: no row in it")
    if reading.tokenizer is not None:
        load_tokenizer(reading)  # reports a bad tokenizer before reading everything
    with (
        show_progress(f"lengths of {options.data}", count_rows(options.data)) as on_done,
        make_executor(options.processes) as executor,
    ):
        for chunk, parts in _measure_all(chain(first, rows), reading, executor, options.processes):
            found.add(parts)
            for place, column in enumerate(keep):
                found.kept[place] += [_keep(where, row, column, numbers[place]) for where, row in chunk]
            on_done(len(found.total))
    for place, values in enumerate(numbers):
        whole = [value for value in values if isinstance(value, int)]
        if len(whole) == len(values):
            found.kept[place] = [whole[number] for number in found.kept[place]]
    return found


def make_lengths(name: str, found: Found) -> Lengths:
    """Returns the lengths in ``found``."""
    total, supervised = (np.array(column, dtype=np.int64) for column in (found.total, found.supervised))
    return Lengths(Path(name).name.split(".")[0], total, supervised)


def _measure_all(
    rows: Iterator[Numbered], reading: RowReading, executor: Executor, processes: int
) -> Iterator[tuple[list[Numbered], list[CountedRow]]]:
    """Yields each chunk of rows with its lengths, in order. Several chunks are processed at a time."""
    waiting: deque[tuple[list[Numbered], Future[list[CountedRow]]]] = deque()
    is_more = True
    while is_more or waiting:
        while is_more and len(waiting) < _AHEAD * processes:
            chunk = list(islice(rows, _CHUNK_ROWS))
            is_more = bool(chunk)
            if chunk:
                waiting.append((chunk, executor.submit(partial(measure_chunk, chunk, reading))))
        if waiting:
            done, future = waiting.popleft()
            yield done, future.result()


def measure_chunk(chunk: Sequence[Numbered], reading: RowReading) -> list[CountedRow]:
    """Returns the lengths of some rows. It runs in a process of the executor."""
    return [measure(where, row, reading) for where, row in chunk]


def _keep(where: str, row: Row, column: str, numbers: dict[int | str, int]) -> int:
    """Returns the number of a value among those of its column, in the order in which they appear."""
    if column not in row:
        raise UsageError(f"{where} has no column {column}")
    value = row[column]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_LENGTH:
        value = repr(value)
    return numbers.setdefault(value, len(numbers))


def summarize(lengths: Lengths) -> dict[str, float | int]:
    """Returns summary figures of the lengths."""
    tokens = lengths.tokens
    half, most, p99 = np.quantile(tokens, (0.5, 0.9, 0.99)).tolist()
    mean = float(tokens.mean())
    return {
        "samples": len(tokens),
        "tokens": int(tokens.sum()),
        "mean_tokens": mean,
        "median": half,
        "p90": most,
        "p99": p99,
        "longest": int(tokens.max()),
        "length_cv": float(tokens.std()) / mean,
        "supervised_share": float(lengths.supervised_tokens.sum()) / int(tokens.sum()),
    }


def make_bins(tokens: Integers) -> list[tuple[int, int, int, float]]:
    """Returns bins of equal ratio: the smallest and the largest length of each, its samples, and its share of all tokens."""
    low, high = int(tokens.min()), int(tokens.max())
    edges = np.unique(np.geomspace(low, high + 1, min(_BINS, high - low + 1) + 1).round().astype(np.int64))
    counts, _ = np.histogram(tokens, edges)
    sums, _ = np.histogram(tokens, edges, weights=tokens)
    ends = [*(edges[1:-1] - 1).tolist(), high]
    return list(zip(edges[:-1].tolist(), ends, counts.tolist(), (sums / tokens.sum()).tolist(), strict=True))


def print_lengths(lengths: Lengths, found: Found) -> None:
    """Prints a summary and a histogram."""
    one, bins = summarize(lengths), make_bins(lengths.tokens)
    most = max(bin_[2] for bin_ in bins)
    rows = [
        [f"{low:,}", f"{high:,}", f"{count:,}", f"{share:.1%}", ("#" * -(-_BAR * count // most)).ljust(_BAR)]
        for low, high, count, share in bins
    ]
    print_table(
        f"{lengths.name}: {one['samples']:,} samples, {one['tokens']:,} tokens, of which {one['supervised_share']:.0%} carry "
        f"loss; mean {one['mean_tokens']:,.0f}, median {one['median']:,.0f}, 99 % within {one['p99']:,.0f}, longest "
        f"{one['longest']:,}",
        _HEADER,
        rows,
    )
    cautions = []
    if found.cut:
        cautions.append(f"{found.cut:,} samples are cut at --max-length")
    if found.approximate:
        cautions.append(
            f"in {found.approximate:,} samples the chat template does not show where an assistant's turn ends: the "
            "token that ends the turn is not counted as carrying loss"
        )
    if found.empty:
        cautions.append(
            f"{found.empty:,} of {len(found.total):,} samples have no token at all, and count as 1 token here: take empty "
            "samples out of the data set, because the loader refuses them"
        )
    if not all(found.supervised):
        cautions.append(f"{found.supervised.count(0):,} samples have no token that carries loss")
    print_cautions(cautions)
