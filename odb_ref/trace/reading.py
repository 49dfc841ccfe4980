"""Reads a trace file line by line, within bounds: no file costs more than one line of memory, or more than one error.

A trace may come from anywhere: a job that was killed while writing, a full disk, a person who wants the checker to fail. So
the size of a line and the digits of an integer are bounded, and anything that is not a trace is refused with an error that
names the file and the line. Spec: R9, R9.5.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn, Protocol

from odb_ref.core.errors import UsageError
from odb_ref.trace.format import FORMAT, VERSIONS, Header, Json, JsonObject, Record, TraceError
from odb_ref.trace.origin import decode_origin

_HEADER: Final = {"format", "version", "driver", "epoch", "world_size", "peer", "workers", "config"}
_ORIGIN: Final = {"run", "inputs", "before"}
_RECORD: Final = {"rank", "time_s", "event", "effects"}

WORLD_SIZE: Final = 2**20
"""The largest world size that is accepted."""

INTEGER_DIGITS: Final = 19
"""The most digits of an integer, because every integer of the protocol fits into 64 bits."""


def compute_line_bytes(world_size: int) -> int:
    """Returns the size of the longest line accepted: it fits a window of samples, or a report of each rank. Spec: R9.5."""
    return 2**24 + 2**12 * world_size


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _parse_integer(digits: str) -> int:
    if len(digits.lstrip("-")) > INTEGER_DIGITS:
        raise ValueError(f"an integer has more than {INTEGER_DIGITS} digits")
    return int(digits)


def _make_object(pairs: list[tuple[str, Json]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice in an object")  # another reader might take the other value
    return found


_DECODE: Final = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_make_object).decode
_DECODE_LONG: Final = json.JSONDecoder(
    parse_constant=_refuse, parse_int=_parse_integer, object_pairs_hook=_make_object
).decode
# A line without 20 digits in a row holds no long integer. That is true of most lines, so only the others are parsed slowly.
_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG: Final = b"0" * (INTEGER_DIGITS + 1)


def _parse(line: bytes) -> Json:
    value: Json = (_DECODE_LONG if _LONG in line.translate(_DIGITS) else _DECODE)(line.decode("utf-8"))
    return value


class Lines(Protocol):
    """The part of a binary file's interface that a `TraceReader` uses."""

    def readline(self, size: int, /) -> bytes:
        """Returns the next line, or its first ``size`` bytes."""

    def close(self) -> None:
        """Closes the file."""


def _open(path: Path) -> Lines:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


class TraceReader:
    """A trace file: its header, then its records one by one.

    With ``is_growing`` the end of the file is not the end of the trace: until `end` is called, `read` can be called again for
    records written later. ``file``, if given, is read instead of the file at ``path``.

    Raises: TraceError, with file and line, when the file is not a trace. Spec: R9, R9.5.
    """

    def __init__(self, path: str | Path, file: Lines | None = None, *, is_growing: bool = False) -> None:
        self.path = path
        self.line = 0
        """The number of the line read last."""
        self.is_growing = is_growing
        self.is_cut = False
        """True when the file ends inside a line, as it may after a process was killed."""
        self._rest = b""
        self._times_s: dict[int, float] = {}
        """The last time of each rank."""
        self._read_bytes = 0
        self._identity: tuple[int, int] | None = None
        """The device and inode of a growing file, by which a replacement is noticed."""
        self._most = compute_line_bytes(1)
        try:
            self._file = _open(Path(path)) if file is None else file
            if file is None and is_growing:
                self._identity = _identify(Path(path).stat())
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from error
        self.header: Header = self._read_header()
        self._most = compute_line_bytes(self.header.world_size)

    def locate(self, what: object) -> TraceError:
        """Returns an error about the line read last."""
        return TraceError(f"{self.path}:{self.line}: {what!s:.400}")

    def read(self) -> Record | None:
        """Returns the next record, or None at the end of the file. Raises: TraceError when the line is not a record."""
        data = self._read_object()
        if data is None:
            return None
        match data:
            case {"rank": int(rank), "event": (dict() | None) as event, "effects": list(effects)} if type(rank) is int:
                if not 0 <= rank < self.header.world_size:
                    raise self.locate(f"rank {rank} in a world of {self.header.world_size}")
                time_s = data.get("time_s", 0)
                is_time = isinstance(time_s, int | float) and type(time_s) is not bool and 0 <= time_s < math.inf
                if not is_time or not data.keys() <= _RECORD:
                    raise self.locate("a record has rank, event and effects, and may have a time in seconds")
                time_s = float(time_s) if isinstance(time_s, int | float) and "time_s" in data else None
                if time_s is not None:
                    last_s = self._times_s.get(rank, 0.0)
                    if time_s < last_s:
                        raise self.locate(f"a time of rank {rank} falls from {last_s} to {time_s} s")
                    self._times_s[rank] = time_s
                return Record(rank, event, tuple(effects), time_s)
            case _:
                raise self.locate("a record needs rank, event and effects")

    def end(self) -> None:
        """Makes the end of the file the end of the trace; no later records are awaited."""
        self.is_growing = False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _read_header(self) -> Header:
        head = self._read_object()
        if head is None:
            if self.is_cut:
                raise TraceError(f"{self.path}:1: the header is cut off")
            raise TraceError(f"{self.path}: empty file, expected an {FORMAT} header")
        if head.get("format") != FORMAT:
            raise self.locate(f"no {FORMAT} header")
        version = head.get("version")
        if type(version) is not int or version not in VERSIONS:
            raise self.locate(f"version {version!r:.80}, but this program reads {' and '.join(map(str, VERSIONS))}")
        known = _HEADER if version == 1 else _HEADER | _ORIGIN
        if others := sorted(head.keys() - known):
            raise self.locate(f"the header has the unknown field {others[0]!r:.80}")
        match head:
            case {"world_size": int(world), "config": dict(config), "driver": str(driver), "epoch": int(epoch)}:
                if not 1 <= world <= WORLD_SIZE or type(world) is not int or epoch < 0 or type(epoch) is not int:
                    raise self.locate(
                        f"epoch {epoch} of a world of {world} ranks; this program reads 1 to {WORLD_SIZE}"
                    )
                peer = head.get("peer", 0)
                if type(peer) is not int or peer < 0:
                    raise self.locate(f"peer {peer!r:.80}; expected a number")
                workers = head.get("workers")
                if workers is not None and (type(workers) is not int or workers < 0):
                    raise self.locate(f"workers is {workers!r:.80}, expected a number")
                try:
                    return Header(world, config, driver, epoch, peer, decode_origin(head, world), workers, version)
                except UsageError as error:
                    raise self.locate(error) from error
            case _:
                raise self.locate("the header lacks world_size, config, driver or epoch")

    def _read_object(self) -> JsonObject | None:
        line = self._read_line()
        if line is None:
            return None
        try:
            data = _parse(line)
        except ValueError as error:
            is_text = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
            if is_text and self.line > 1 and not line.endswith(b"\n") and not isinstance(self._file, gzip.GzipFile):
                self.is_cut = True
                return None
            if isinstance(error, json.JSONDecodeError):
                raise self.locate(f"not JSON, or cut off: {error.msg}: column {error.colno}") from error
            raise self.locate(error) from error
        except RecursionError as error:
            raise self.locate("lists and objects are nested too deeply") from error
        if not isinstance(data, dict):
            raise self.locate("not a JSON object")
        return data

    def _read_line(self) -> bytes | None:
        """Returns the next line, or None at the present end of the file."""
        try:
            more = self._file.readline(self._most + 1 - len(self._rest))
        except EOFError:  # the compressed stream ends early
            self.is_cut = True
            return None
        except (OSError, zlib.error) as error:
            self.line += 1
            raise self.locate(error) from error
        self._read_bytes += len(more)
        if not more and self.is_growing:
            self._check_same()
        line = self._rest + more
        if not line:
            return None
        if self.is_growing and not line.endswith(b"\n") and len(line) <= self._most:
            self._rest = line
            return None
        self._rest = b""
        self.line += 1
        if len(line) > self._most:
            raise self.locate(f"a line of more than {self._most} bytes")
        return line

    def _check_same(self) -> None:
        """Checks that the path still holds the same trace, because another run may write to the same name.

        A deleted file is still read, because its writer may have it open.

        Raises: TraceError when the file is now shorter than the part read, or has been replaced.
        """
        try:
            now = Path(self.path).stat()
        except OSError:
            return
        # A loader creates the file, and then its process creates it again with the same header. So a file that was shortened
        # when only its header had been read is still the same trace.
        is_shorter = now.st_size < self._read_bytes and self.line > 1
        if self._identity is not None and (is_shorter or _identify(now) != self._identity):
            raise self.locate("the rest belongs to another trace: the file was rewritten while it was followed")


def _identify(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def read_trace(path: str | Path) -> tuple[Header, Iterator[Record]]:
    """Returns the header and an iterator over the records.

    Raises: TraceError, naming file and line, when the file is not a trace, either at once or while iterating.
    """
    reader = TraceReader(path)
    return reader.header, _iterate(reader)


def _iterate(reader: TraceReader) -> Iterator[Record]:
    try:
        while (record := reader.read()) is not None:
            yield record
        if reader.is_cut:
            raise reader.locate("cut off")
    finally:
        reader.close()
