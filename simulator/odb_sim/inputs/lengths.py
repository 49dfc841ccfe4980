"""Reads length traces, which hold what a planner knows of a data set: one row for each sample.

A trace is the name of a bundled one, a CSV (or CSV.gz) file whose header has ``total_tokens``, or a ``.npy`` file with one
integer for each sample. Every error is reported in one line, with the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from tokenize import TokenError
from typing import IO, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from odb_ref.core.errors import UsageError
from odb_sim.inputs.texts import is_text_file

Integers = NDArray[np.int64]

TOTAL_COLUMN: Final = "total_tokens"
SUPERVISED_COLUMN: Final = "supervised_tokens"
_SUFFIX: Final = ".csv.gz"
_GZIP: Final = b"\x1f\x8b"
"""The first bytes of a compressed file."""
LARGEST_LENGTH: Final = 2**31 - 1
_NAME: Final = re.compile(r"[\w./-]{1,40}( [\w./-]{1,20})?")
"""Matches column names. Anything else may be text from a private data set, which errors must not show."""
_SHORT: Final = re.compile(r"\S{0,24}")
_WHOLE: Final = re.compile(r"\s*[+-]?[0-9]{1,100}\s*")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the samples of a data set, in source order: tokens, and the tokens that carry loss (label != -100).

    If the source does not give the tokens that carry loss, all do. ``resources`` holds a row for each sample with its use of
    each further resource requested.
    """

    name: str
    tokens: Integers
    supervised_tokens: Integers
    resources: Integers | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def list_bundled_names() -> list[str]:
    """Returns the names of the traces that ship with the package, sorted."""
    files = (resources.files("odb_sim") / "data").iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def load_lengths(source: str, further: Sequence[str] = ()) -> Lengths:
    """Returns the lengths in ``source``: the name of a bundled trace, or the path of a CSV, CSV.gz or .npy file.

    ``further`` names the columns with each sample's use of further resources.

    Raises: UsageError, in one line with file and line, when there is no such trace or it holds anything but lengths.
    """
    if source in list_bundled_names():
        return _load_bundled(source, tuple(further))
    if source == "-":
        raise UsageError("-: lengths are not read from standard input; for a file of that name, pass ./-")
    path = Path(source)
    if not path.exists():
        names = list_bundled_names()
        near = "".join(f"; did you mean {name}?" for name in get_close_matches(source, names, 1))
        raise UsageError(
            f"{source}: no such file, and no bundled trace{near}; the bundled traces are {', '.join(names)}"
        )
    if is_text_file(path):
        raise UsageError(f"{source}: holds texts, but lengths are expected: {describe_remedy(source)}")
    if path.is_dir():
        raise UsageError(f"{source}: is a directory, expected a CSV, CSV.gz or .npy file")
    if path.suffix == ".npy":
        if further:
            raise UsageError(f"{source}: no column {further[0]}, because a .npy file holds only lengths")
        return _load_npy(path)
    try:
        with _open_text(path) as file:
            return _parse_csv(file, source, path.name.split(".")[0], further)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{source}: cannot be read: {_describe_error(error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 text (byte {error.start})") from error


@cache
def _load_bundled(name: str, further: tuple[str, ...]) -> Lengths:
    with (resources.files("odb_sim") / "data" / (name + _SUFFIX)).open("rb") as packed:
        lengths = _parse_csv(io.TextIOWrapper(gzip.GzipFile(fileobj=packed), encoding="utf-8"), name, name, further)
    for column in (lengths.tokens, lengths.supervised_tokens, lengths.resources):
        if column is not None:
            column.flags.writeable = False  # all callers share it
    return lengths


def describe_remedy(source: str) -> str:
    """Returns the command that makes lengths from texts."""
    return f"odb-ref lengths {source} --tokenizer TOKENIZER --out lengths.csv makes them"


def _describe(header: list[str], where: str) -> str:
    """Returns the names of a header, without anything that may be text from a data set."""
    if not all(map(_NAME.fullmatch, header)):
        return f"it is not one; if the file holds texts, {describe_remedy(where)}"
    return f"the columns are {', '.join(header)}"[:240] + f"; if the file holds texts, {describe_remedy(where)}"


def _describe_error(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())


@contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as file:  # once, because a pipe can be read only once
        is_packed = file.peek(len(_GZIP)).startswith(_GZIP) or path.suffix == ".gz"  # whatever its name
        yield io.TextIOWrapper(gzip.GzipFile(fileobj=file) if is_packed else file, encoding="utf-8-sig", newline="")


def _parse_csv(file: IO[str], where: str, name: str, further: Sequence[str]) -> Lengths:
    rows = csv.reader(file, strict=True)  # else a quotation mark that is never closed takes all rows after it
    try:
        header = [column.strip() for column in next(rows, [])]
        if not header:
            raise UsageError(f"{where}: empty file, expected a CSV header with {TOTAL_COLUMN}")
        for column in (TOTAL_COLUMN, *further):
            if column not in header:
                raise UsageError(
                    f"{where}:1: no column {column} in the header, the first line; {_describe(header, where)}"
                )
        for column in (TOTAL_COLUMN, SUPERVISED_COLUMN, *further):
            if header.count(column) > 1:
                raise UsageError(f"{where}:1: {header.count(column)} columns have the name {column}")
        supervised_column = SUPERVISED_COLUMN if SUPERVISED_COLUMN in header else TOTAL_COLUMN
        columns = [header.index(column) for column in (TOTAL_COLUMN, supervised_column, *further)]
        tokens, supervised, used = array("q"), array("q"), array("q")
        empty = 0
        for row in rows:
            if not row:
                empty = empty or rows.line_num
                continue
            if empty and len(header) == 1:  # a row without its only value; with more columns it would have commas
                raise UsageError(f"{where}:{empty}: an empty line between rows: remove it, or fill in {TOTAL_COLUMN}")
            values = _parse_row(row, columns, header, f"{where}:{rows.line_num}")
            tokens.append(values[0])
            supervised.append(values[1])
            used.extend(values[2:])
    except csv.Error as error:
        raise UsageError(f"{where}:{rows.line_num}: {error}") from error
    if not tokens:
        raise UsageError(f"{where}: a header and no rows, expected at least one sample")
    resources_used = np.array(used, dtype=np.int64).reshape(len(tokens), len(further))
    return Lengths(name, np.array(tokens, dtype=np.int64), np.array(supervised, dtype=np.int64), resources_used)


def _parse_row(row: list[str], columns: list[int], header: list[str], where: str) -> list[int]:
    """Returns the values of ``columns``: total tokens, supervised tokens, then the use of further resources."""
    values = []
    if len(row) != len(header):
        raise UsageError(f"{where}: {len(row)} values, but the header has {len(header)} columns")
    for column in columns:
        if not _WHOLE.fullmatch(row[column]):  # int() accepts more, such as 1_000 and digits of other scripts
            shown = repr(row[column]) if _SHORT.fullmatch(row[column]) else f"a text of {len(row[column]):,} characters"
            raise UsageError(f"{where}: {header[column]} is {shown}, not a whole number")
        value = int(row[column])
        if value > LARGEST_LENGTH:
            raise UsageError(f"{where}: {header[column]} is {value:.3e}, but the largest length is {LARGEST_LENGTH}")
        values.append(value)
    if values[0] < 1:
        raise UsageError(f"{where}: {TOTAL_COLUMN} is {values[0]}, but a length is at least 1")
    if not 0 <= values[1] <= values[0]:
        raise UsageError(f"{where}: {SUPERVISED_COLUMN} is {values[1]}, expected 0 to {TOTAL_COLUMN} ({values[0]})")
    for column, value in zip(columns[2:], values[2:], strict=True):
        if value < 0:
            raise UsageError(f"{where}: {header[column]} is {value}, but an amount is at least 0")
    return values


def _load_npy(path: Path) -> Lengths:
    try:
        data = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, SyntaxError, TokenError, BadZipFile) as error:  # the header is parsed
        raise UsageError(f"{path}: cannot be read: {_describe_error(error)}") from error
    if not isinstance(data, np.ndarray):
        raise UsageError(f"{path}: several arrays in one .npz file, expected one in a .npy file")
    if data.ndim != 1 or data.dtype.kind not in "iu":
        raise UsageError(f"{path}: an array of {data.dtype} with shape {data.shape}, expected one row of integers")
    if not len(data):
        raise UsageError(f"{path}: empty array, expected at least one sample")
    for bad in _find_first((data < 1) | (data > LARGEST_LENGTH)):
        raise UsageError(f"{path}: element {bad} is {data[bad]}, but a length lies in 1..{LARGEST_LENGTH}")
    tokens = data.astype(np.int64)
    return Lengths(path.stem, tokens, tokens)


def _find_first(mask: NDArray[np.bool_]) -> Iterator[int]:
    if mask.any():
        yield int(mask.argmax())
