"""Files that commands write. Errors name the file, which an OSError of writing, on a full disk for example, does not."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from odb_ref.core.errors import UsageError

_ESCAPED: Final = "backslashreplace"
"""How the bytes of a path are written that are not UTF-8."""
_READ: Final = ("*.ndjson*", "*.arrow", "*/*.arrow")
"""The files that are read of a folder: of traces, or of a saved data set and its splits."""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Makes an OSError raised inside the block name ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def _writing(path: str | Path) -> Iterator[TextIO]:
    """Opens a file, as UTF-8, and removes it if it is not written to its end: half a file looks like a whole one."""
    with naming(path), Path(path).open("w", encoding="utf-8", errors=_ESCAPED, newline="") as file:
        try:
            yield file
            file.flush()  # here at the latest a full disk shows
        except BaseException:
            if Path(path).is_file():  # not a device
                Path(path).unlink()
            raise


def write_text(path: str | Path, text: str) -> None:
    """Writes a file, as UTF-8. Raises: OSError, with the file's name."""
    with _writing(path) as file:
        file.write(text)


def write_json(path: str | Path, data: Mapping[str, object] | Sequence[object], *, indent: int = 2) -> None:
    """Writes a file of JSON. Raises: OSError, with the file's name."""
    write_text(path, json.dumps(data, indent=indent) + "\n")


def write_csv(path: str | Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes a file of comma-separated values; the first row is the header. Raises: OSError, with the file's name."""
    with _writing(path) as file:
        csv.writer(file).writerows(rows)


def check_files(*paths: str | Path | None, reads: Iterable[str | Path | None] = ()) -> None:
    """Checks, before anything is read, that every path can be written, and that none is given twice or also read: itself, in a
    folder, or as the file of a target rule, ``path.py:name``.

    A device is not read, because it may never end, nor a link that leads nowhere, which would be taken for a name on the hub.
    Raises: UsageError naming the path.
    """
    given = [Path(part) for path in reads if path is not None for part in (path, str(path).rpartition(":")[0]) if part]
    given += [file for path in given if path.is_dir() for kind in _READ for file in path.glob(kind)]
    if devices := [path for path in given if path.is_char_device() or path.is_block_device()]:
        raise UsageError(f"{devices[0]}: a device, expected a file")
    if links := [path for path in given if path.is_symlink() and not path.exists()]:
        raise UsageError(f"{links[0]}: a link that leads to no file")
    files = {_identify(path) for path in given if path.is_file()}
    for path in paths:
        if path is None:
            continue
        if str(path) == "-":
            raise UsageError("-: only --json can be written to standard output; for a file of that name, pass ./-")
        file = _identify(Path(path))
        if file in files:
            raise UsageError(f"{path}: named twice, so its contents would be lost")
        if Path(path).is_file() or not Path(path).exists():  # a device takes what it is given
            files.add(file)
        is_new = not Path(path).exists()
        try:
            with Path(path).open("ab"):
                pass
        except OSError as error:
            folder = Path(path).parent
            hint = "" if folder.is_dir() else f" (make the folder {folder} first)"
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}{hint}") from error
        if is_new:
            Path(path).unlink()


def _identify(path: Path) -> Path | tuple[int, int]:
    """Returns what all names of a file have in common, hard links among them."""
    return (path.stat().st_dev, path.stat().st_ino) if path.exists() else path.resolve()
