"""Trace files into jobs, and a job's files into one order in which every answer follows what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from odb_ref.core.check.decode import Settings, decode_settings
from odb_ref.core.trace import Header, Record, TraceError, read_trace


class Stream:
    """A trace file with its next record in sight.

    Raises: TraceError when the file is no trace; a last line that is cut off, as by a killed process, only ends it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        header, records = read_trace(path)
        self.header: Header = header
        self.is_cut = False
        """True when the file ends inside a line."""
        self.ranks: set[int] = set()
        """The ranks seen so far."""
        self._records = records
        self._line = 1
        self.next: Record | None = None
        try:
            self.settings: Settings = decode_settings(header.config)
        except TraceError as error:
            raise TraceError(f"{path}:1: {error}") from error
        self.advance()

    def advance(self) -> None:
        """Moves on to the next record; ``next`` is None at the end."""
        self._line += 1
        try:
            self.next = next(self._records, None)
        except TraceError as error:
            if not self._is_cut_off(error):
                raise
            self.next = None
            self.is_cut = True
        if self.next is not None:
            if not 0 <= self.next.rank < self.header.world_size:
                raise self.locate(f"rank {self.next.rank} in a world of {self.header.world_size}")
            self.ranks.add(self.next.rank)

    def locate(self, what: object) -> TraceError:
        """An error about the next record, with file and line."""
        return TraceError(f"{self.path}:{self._line}: {what}")

    def _is_cut_off(self, error: TraceError) -> bool:
        if isinstance(error.__cause__, EOFError):
            return True
        path = Path(self.path)
        if not isinstance(error.__cause__, json.JSONDecodeError) or path.suffix == ".gz":
            return False
        with path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"


def group_into_jobs(streams: Sequence[Stream]) -> list[list[Stream]]:
    """The files of each epoch of each job, in the order given.

    Files of one job agree in driver, epoch and world size and begin with different ranks; a rank that comes again begins
    another job.
    """
    jobs: list[list[Stream]] = []
    for stream in streams:
        for job in jobs:
            head = job[0].header
            is_same = (head.driver, head.epoch, head.world_size) == (
                stream.header.driver,
                stream.header.epoch,
                stream.header.world_size,
            )
            if is_same and not any(other.ranks & stream.ranks for other in job):
                job.append(stream)
                break
        else:
            jobs.append([stream])
    return jobs


def merge(
    streams: Sequence[Stream], get_missing: Callable[[Record], set[int]], note_gone: Callable[[set[int]], None]
) -> Iterator[tuple[Stream, Record]]:
    """All records of a job, with their stream, an answer only when ``get_missing``, the ranks it waits for, is empty.

    In one file the order is as written. Between files it is any order that could have been; where there is none, a rank
    whose file has ended is reported to ``note_gone``, and otherwise the answer that came too early is let through. Streams
    move on when the next record is asked for.
    """
    active = [stream for stream in streams if stream.next is not None]
    while active:
        has_moved = False
        for stream in active:
            while stream.next is not None and not get_missing(stream.next):
                has_moved = True
                yield stream, stream.next
                stream.advance()
        active = [stream for stream in active if stream.next is not None]
        if has_moved or not active:
            continue
        alive = set().union(*(stream.ranks for stream in active))
        waited_for = set().union(*(get_missing(stream.next) for stream in active if stream.next is not None))
        if waited_for - alive:
            note_gone(waited_for - alive)
            continue
        first = active[0]
        if first.next is not None:
            yield first, first.next
            first.advance()
