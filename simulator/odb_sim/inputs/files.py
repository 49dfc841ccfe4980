"""Files that commands write. What goes wrong names the file: an error of writing, on a full disk say, does not by itself."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Has an OSError that is raised inside name ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Writes a file, as UTF-8.

    Raises: OSError, with the file's name.
    """
    with naming(path):
        Path(path).write_text(text, encoding="utf-8")


def write_json(path: str | Path, data: Mapping[str, object] | Sequence[object]) -> None:
    """Writes a file of JSON.

    Raises: OSError, with the file's name.
    """
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_csv(path: str | Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes a file of comma-separated values; the first row is the header.

    Raises: OSError, with the file's name.
    """
    with naming(path), Path(path).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
