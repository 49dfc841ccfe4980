"""Judges a job while it runs, from traces that are still growing. Spec: R9."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from odb_ref.core.errors import UsageError
from odb_ref.trace.check.job import Job, check_no_twice, judge_jobs
from odb_ref.trace.check.replay import Rules
from odb_ref.trace.check.stream import Stream, is_of_job, list_traces
from odb_ref.trace.check.verdict import Verdict, Violation


class Follower:
    """Follows trace files that are still being written, or do not exist yet. A folder stands for every ``*.ndjson`` in it.

    Calls ``on_violation`` once for each violation, as soon as the traces show it. Violations that only the end can show (a
    rank that waits for ever, samples that were never emitted) are in the verdict of `end`.

    Raises: UsageError when a trace is compressed, because it cannot be read before it is closed, or when one is given twice.
    """

    def __init__(self, paths: Sequence[str | Path], on_violation: Callable[[Violation], None]) -> None:
        self._folders = [Path(path) for path in paths if Path(path).is_dir()]
        self._awaited = [Path(path) for path in paths if not Path(path).is_dir()]
        for path in self._awaited:
            if path.suffix == ".gz":
                raise UsageError(f"{path}: a compressed trace cannot be followed")
        self._seen = set(self._awaited)
        check_no_twice(self._awaited)
        self._fresh: list[Stream] = []
        """Files without a record yet, so that their ranks, and hence their jobs, are unknown."""
        self._jobs: list[tuple[list[Stream], Job, Iterator[None]]] = []
        self._on_violation = on_violation

    @property
    def is_done(self) -> bool:
        """True when every rank of every job has ended. Always false with a folder, where more jobs may begin."""
        is_open = bool(self._folders or self._awaited or self._fresh)
        return not is_open and bool(self._jobs) and all(job.is_done for _, job, _ in self._jobs)

    def advance(self) -> bool:
        """Judges the records written since the last call. Returns True when there were any.

        Raises: TraceError when a line is malformed.
        """
        self._find()
        self._open()
        return self._judge()

    def _judge(self) -> bool:
        before = sum(job.records for _, job, _ in self._jobs)
        for _, job, records in self._jobs:
            next(records, None)
            for violation in job.take_news():
                self._on_violation(violation)
        return sum(job.records for _, job, _ in self._jobs) > before

    def end(self, *, is_replayed: bool = False, rules: Rules = ()) -> Verdict:
        """Returns the verdict on the traces as they are now, without waiting for more.

        Raises: TraceError when a line is malformed; UsageError when there is no trace.
        """
        self._find()
        self._open()
        for stream in self._fresh:
            self._place(stream)
        if not self._jobs:
            raise UsageError(f"{self._awaited[0]}: no trace was written" if self._awaited else "no trace to check")
        for streams, _, _ in self._jobs:
            for stream in streams:
                stream.end()
        self._judge()
        return judge_jobs([job for _, job, _ in self._jobs], is_replayed=is_replayed, rules=rules)

    def _find(self) -> None:
        for folder in self._folders:
            for path in list_traces(folder):
                if path not in self._seen and path.suffix != ".gz":  # a compressed file cannot be read as it grows
                    self._seen.add(path)
                    self._awaited.append(path)

    def _open(self) -> None:
        awaited, self._awaited = self._awaited, []
        for path in awaited:
            if _has_header(path):
                self._fresh.append(Stream(path, is_growing=True))
            else:
                self._awaited.append(path)
        fresh, self._fresh = self._fresh, []
        for stream in fresh:
            if stream.next is None:
                stream.advance()
            if stream.next is None:
                self._fresh.append(stream)
            else:
                self._place(stream)

    def _place(self, stream: Stream) -> None:
        for streams, _, _ in self._jobs:
            if is_of_job(stream, streams):
                streams.append(stream)
                return
        streams = [stream]
        job = Job(streams)
        self._jobs.append((streams, job, job.follow()))


def _has_header(path: Path) -> bool:
    """Returns True when the file holds a whole line, because a half-written header is not malformed.

    It also returns True for a very long line, which is left to the reader.
    """
    if not path.exists():
        return False
    with path.open("rb") as file:
        start = file.read(2**16)
    return b"\n" in start or len(start) == 2**16
