"""Writes traces: one file for each rank and epoch."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from odb_ref.core.config import Config
from odb_ref.core.effects import Effect
from odb_ref.core.events import Agreed, Event
from odb_ref.core.resume import Resumed
from odb_ref.trace.format import FORMAT, SET_ASIDE, VERSION, Json, JsonObject, encode_effect, encode_event
from odb_ref.trace.origin import UNKNOWN, Origin


class TraceWriter:
    """Writes a trace file; a context manager. Pass its ``record`` to a `Machine` as the observer."""

    def __init__(
        self,
        path: str | Path,
        config: Config,
        *,
        driver: str,
        epoch: int = 0,
        workers: int | None = None,
        origin: Origin = UNKNOWN,
    ) -> None:
        self._path = Path(path)
        self._file: IO[str] = _open_to_write(self._path)
        self._is_packed = self._path.suffix == ".gz"
        header = {
            "format": FORMAT,
            "version": VERSION,
            "driver": driver,
            "epoch": epoch,
            "world_size": config.world_size,
            **({} if workers is None else {"workers": workers}),
            "config": json.loads(config.shared_json),
            **origin.to_json(),
        }
        self._write({**header, "peer": config.peer} if config.peer else header)
        self.flush()  # a process that is killed early must leave a trace with a header, not an empty file

    def record(
        self, rank: int, event: Event | Resumed | None, effects: Sequence[Effect], time_s: float | None = None
    ) -> None:
        """Writes one record."""
        line: dict[str, Json] = {"rank": rank}
        if time_s is not None:
            line["time_s"] = round(time_s, 6)
        line["event"] = None if event is None else encode_event(event)
        line["effects"] = [encode_effect(effect) for effect in effects]
        self._write(line)
        if isinstance(event, Agreed) and not self._is_packed:
            self.flush()  # once a round, so that a job can be followed, and a killed one leaves its records

    def set_aside(self, rank: int, id_: int, place: int) -> None:
        """Writes that the rank has set a sample aside: its id, and its place in the order of ``Origin.inputs``.

        Call it before recording the samples read after this one. Spec: R9.6.
        """
        self._write({"rank": rank, "event": {"kind": SET_ASIDE, "id": id_, "place": place}, "effects": []})

    def _write(self, line: JsonObject) -> None:
        with self._naming_file():
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Makes the records visible to readers."""
        with self._naming_file():
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with self._naming_file():
            self._file.close()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Names the file in an error, which may be all that a full disk lets anyone know."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _open_to_write(path: Path) -> IO[str]:
    if path.suffix != ".gz":
        return path.open("w", encoding="utf-8")
    # The gzip header has neither a name nor a time, so that the same run gives the same bytes.
    return io.TextIOWrapper(gzip.GzipFile(filename="", fileobj=path.open("wb"), mode="wb", mtime=0), encoding="utf-8")
