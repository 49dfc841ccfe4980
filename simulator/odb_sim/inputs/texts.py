"""Rows of a data set from JSON lines, JSON, parquet, a folder saved by `datasets`, or a Python callable.

A row is a dict or just a text. Errors never show the contents of a row, because data sets may be private.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from odb_ref.core.errors import UsageError
from odb_sim.inputs.rules import describe_error, import_named

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
Row: TypeAlias = Mapping[str, Json]

TEXT: Final = "text"
"""The column of a row that is just a text."""
FORMATS: Final = "JSON lines (.jsonl, .jsonl.gz), JSON, CSV, parquet, a folder saved by datasets, or module:function"
_LINES: Final = (".jsonl", ".ndjson")
_BATCH_ROWS: Final = 1024
_LARGEST_TEXT: Final = 2**31 - 1
INSTALL: Final = "pip install 'odb-ref[data]'"


def is_text_file(path: Path) -> bool:
    """Returns True when a file's name says that it holds texts, not lengths."""
    names = path.name.lower().removesuffix(".gz")
    return names.endswith((*_LINES, ".json", ".parquet", ".arrow", ".txt", ".md")) or (path / "state.json").exists()


def read_rows(source: str, split: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yields each row with its location. ``split`` chooses a part of a saved data set that has several.

    Raises: UsageError naming file and line, when the source cannot be read or holds something that is not a row.
    """
    module, colon, _ = source.rpartition(":")
    path = Path(source)
    if colon and not path.exists() and (module.endswith(".py") or module.isidentifier() or "." in module):
        yield from _number(source, _call(source))
        return
    if not path.exists():
        raise UsageError(f"{source}: no such file; expected {FORMATS}")
    name = path.name.lower().removesuffix(".gz")
    if path.is_dir():
        yield from _number(source, _read_saved(path, split))
    elif name.endswith(".parquet"):
        yield from _number(source, _read_parquet(path))
    elif name.endswith(_LINES):
        yield from _read_lines(path)
    elif name.endswith(".csv"):
        yield from _number(source, _read_csv(path))
    elif name.endswith(".json"):
        yield from _number(source, _read_json(path))
    else:
        raise UsageError(f"{source}: unknown kind of file; expected {FORMATS}")


def count_rows(source: str) -> int:
    """Returns the number of rows in a file of JSON lines, or 0 for sources where it is unknown before reading."""
    path = Path(source)
    if not path.is_file() or not path.name.lower().endswith(_LINES):
        return 0
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _number(source: str, rows: Iterable[object]) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows, 1):
        where = f"{source}: row {number}"
        yield where, _check(where, row)


def _check(where: str, row: object) -> Row:
    if isinstance(row, str):
        return {TEXT: row}
    if isinstance(row, Mapping):
        return row
    raise UsageError(f"{where} is of type {type(row).__name__}, expected an object or a string")


def _open(path: Path) -> Iterator[str]:
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig") as file
        ):
            yield from file
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LARGEST_TEXT)  # for all readers: by default a text has at most 131,072 characters
    # Without `strict` a quotation mark that is never closed takes all rows after it.
    rows = csv.DictReader(_open(path), strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():  # most likely a comma in a text without quotation marks
                count = len(rows.fieldnames or ())
                raise UsageError(
                    f"{path}:{rows.reader.line_num}: more or fewer values than the {count} columns of the header"
                )
            yield row
    except csv.Error as error:
        raise UsageError(f"{path}:{rows.reader.line_num}: {error}") from error


def _read_lines(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(_open(path), 1):
        if line.isspace():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: {_describe_json(error)}") from None
        yield where, _check(where, row)


def _read_json(path: Path) -> Iterable[object]:
    text = "".join(_open(path))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}{line}: {_describe_json(error)}") from None
    if not isinstance(data, list):
        raise UsageError(f"{path}: holds an object, expected a list of rows")
    return data


def _describe_json(error: Exception) -> str:
    """Returns what is wrong, without the text."""
    if isinstance(error, RecursionError):
        return "not JSON: nested too deep"
    return f"not JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else "holds a number of too many digits"


def _read_parquet(path: Path) -> Iterator[object]:
    try:
        from pyarrow import lib, parquet
    except ImportError:
        raise UsageError(f"{path}: parquet needs pyarrow: {INSTALL}") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                yield from batch.to_pylist()
    except (OSError, lib.ArrowException) as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())[:120]}") from error


def _read_saved(path: Path, split: str | None) -> Iterator[object]:
    try:
        import datasets
    except ImportError:
        raise UsageError(f"{path}: a saved data set needs datasets: {INSTALL}") from None
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a data set that datasets saved: {' '.join(str(error).split())[:120]}") from error
    if isinstance(found, Mapping):
        if split not in found:
            raise UsageError(f"{path}: has the splits {', '.join(found)}: choose one with --split")
        found = found[split]
    for begin in range(0, len(found), _BATCH_ROWS):
        yield from found.select(range(begin, min(begin + _BATCH_ROWS, len(found)))).to_list()


def _call(source: str) -> Iterator[object]:
    """Yields the rows from a callable, which returns an iterable or an object with a length and items."""
    module_name, _, attribute = source.rpartition(":")
    try:
        found: object = getattr(import_named(module_name), attribute)
        rows = found() if callable(found) else found
        if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable | Sequence):
            raise TypeError(f"gives a {type(rows).__name__}, expected rows")
        yield from rows
    except (Exception, SystemExit) as error:  # anything the user's module may do wrong
        raise UsageError(f"{source}: {describe_error(error)}") from error
