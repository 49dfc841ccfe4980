"""Groups trace files into jobs, and merges a job's files into one order in which every answer follows the posts it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from odb_ref.trace.check.decode import Settings, decode_settings
from odb_ref.trace.format import Header, Record, TraceError
from odb_ref.trace.reading import Lines, TraceReader


class Posts(Protocol):
    """Knows which ranks have posted to which exchange."""

    def is_early(self, record: Record) -> bool:
        """Returns True when the record answers an exchange to which not all ranks have posted."""

    def list_missing(self, record: Record) -> set[int]:
        """Returns the ranks that the record waits for."""

    def lose(self, ranks: set[int]) -> None:
        """Notes that the traces of ``ranks`` have ended, so that their missing posts count as unknown."""


class Stream:
    """A trace file with its next record ready.

    With ``is_growing`` the file is still being written: ``next`` is None until its next line is written, and `advance`
    looks again. ``file``, if given, is read instead of the file at ``path``.

    Raises: TraceError when the file is not a trace. A last line that is cut off, as by a killed process, only ends the stream.
    """

    def __init__(self, path: str | Path, file: Lines | None = None, *, is_growing: bool = False) -> None:
        self.path = path
        self._reader = TraceReader(path, file, is_growing=is_growing)
        self.header: Header = self._reader.header
        self.ranks: set[int] = set()
        """The ranks seen so far."""
        self.next: Record | None = None
        try:
            self.settings: Settings = decode_settings(self.header)
        except TraceError as error:
            raise self.locate(error) from error
        self.advance()

    @property
    def is_growing(self) -> bool:
        """True while more may be written to the file."""
        return self._reader.is_growing

    @property
    def is_cut(self) -> bool:
        """True when the file ends inside a line."""
        return self._reader.is_cut

    def advance(self) -> None:
        """Moves on to the next record; ``next`` is None at the end."""
        self.next = self._reader.read()
        if self.next is not None:
            self.ranks.add(self.next.rank)

    def end(self) -> None:
        """Stops waiting for more: the present end of the file is the end of the trace."""
        self._reader.end()
        if self.next is None:
            self.advance()

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def locate(self, what: object) -> TraceError:
        """Returns an error about the next record, with file and line."""
        return self._reader.locate(what)


def list_traces(folder: Path) -> list[Path]:
    """Returns the trace files of a folder, sorted by name."""
    return sorted([*folder.glob("*.ndjson"), *folder.glob("*.ndjson.gz")])


def group_into_jobs(streams: Sequence[Stream]) -> list[list[Stream]]:
    """Returns the files of each epoch of each job, in the order given.

    Files of one job agree in driver, epoch, world size and peer, and in the run if they name one, and begin with different
    ranks. A file whose rank is already in the job begins another job. If ranks have peers, the peers of each number are judged
    as one job. Spec: R17.5.
    """
    jobs: list[list[Stream]] = []
    for stream in streams:
        job = next((job for job in jobs if is_of_job(stream, job)), None)
        if job is None:
            jobs.append([stream])
        else:
            job.append(stream)
    return jobs


def is_of_job(stream: Stream, job: Sequence[Stream]) -> bool:
    """Returns True when ``stream`` may be one more file of ``job``."""
    ours, theirs = stream.header, job[0].header
    is_same = (ours.driver, ours.epoch, ours.world_size) == (theirs.driver, theirs.epoch, theirs.world_size)
    runs = {other.header.origin.run for other in job} | {ours.origin.run}
    is_same = is_same and ours.peer == theirs.peer and len(runs - {""}) < 2
    return is_same and not any(other.ranks & stream.ranks for other in job)


def merge(streams: Sequence[Stream], exchanges: Posts) -> Iterator[tuple[Stream, Record] | None]:
    """Yields all records of a job with their streams, each answer only after all ranks it waits for have posted.

    Records of one file come in the order written. Those of different files come in any possible order. If there is none, a
    missing rank whose file has ended counts as gone (`Posts.lose`); failing that, the early answer is let through. A stream
    advances when the next record is requested. While files grow, ``streams`` itself may grow too, and the iterator yields None
    when it has to wait.
    """
    while True:
        has_moved = False
        for stream in streams:
            if stream.next is None and stream.is_growing:
                stream.advance()
            while stream.next is not None and not exchanges.is_early(stream.next):
                has_moved = True
                yield stream, stream.next
                stream.advance()
        if has_moved:
            continue
        if any(stream.is_growing for stream in streams):
            yield None
            continue
        active = [(stream, stream.next) for stream in streams if stream.next is not None]
        if not active:
            return
        alive = set[int]().union(*(stream.ranks for stream, _ in active))
        waited_for = set[int]().union(*(exchanges.list_missing(record) for _, record in active))
        if waited_for - alive:
            exchanges.lose(waited_for - alive)
            continue
        yield active[0]
        active[0][0].advance()
