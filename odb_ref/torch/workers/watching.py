"""How long a process has done nothing, by what the operating system says of it at one look after another.

Never by the clock: if the whole job is stopped for a while, nobody is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.process import BaseProcess

from odb_ref.torch.exchange.process_table import ProcessStatus, read_status


def _describe_stop(seconds: float) -> str:
    return f"has been stopped for {seconds:g} s (SIGSTOP, or a debugger)"


class Silence:
    """How long a loader process has not been heard of while it did nothing either.

    One that uses its processor is not silent, however long it holds its interpreter lock.
    """

    def __init__(self, process: BaseProcess, *, is_heard: bool) -> None:
        self._pid = process.pid or 0
        self.is_heard = is_heard
        """True once the process has said something, or should have."""
        self._status: ProcessStatus | None = None
        self.seconds = 0.0

    def end(self) -> None:
        """Notes that the process has sent something."""
        self.seconds, self.is_heard = 0.0, True

    def count(self, seconds: float) -> None:
        """Notes that the process has sent nothing for so long."""
        before = self._status
        try:
            self._status = read_status(self._pid)
        except OSError:  # that it cannot be seen says nothing about it
            return
        if self._status is not None and self._status.is_busy_since(before):
            self.seconds = 0.0
        elif self.is_heard or (self._status is not None and self._status.is_stopped):
            self.seconds += seconds

    def describe(self) -> str:
        """Returns what it has done instead."""
        if self._status is not None and self._status.is_stopped:
            return _describe_stop(self.seconds)
        return (
            f"has neither been heard of nor used its processor for {self.seconds:g} s (timeout_s): "
            "something holds its interpreter lock, or it was forked while a lock was held"
        )


class Stops:
    """How long the processes that read and collate for a loader process have been stopped.

    One that only takes its time is waited for, whatever it waits for itself. Where the operating system does not say which of
    the two it is, ``timeout=`` of the loader is there.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stopped_s: dict[int, float] = {}
        """By process, of those that were stopped at the last look."""

    def look(self, processes: Iterable[BaseProcess], seconds: float) -> tuple[BaseProcess, str] | None:
        """Looks at them, ``seconds`` after the last time; returns one that was stopped for too long, and how long in words."""
        stopped = {process.pid: process for process in processes if _is_stopped(process.pid)}
        self._stopped_s = {pid: self._stopped_s.get(pid, 0.0) + seconds for pid in stopped if pid is not None}
        for pid, stopped_s in self._stopped_s.items():
            if stopped_s >= self._limit_s:
                return stopped[pid], _describe_stop(stopped_s)
        return None


def _is_stopped(pid: int | None) -> bool:
    try:
        status = None if pid is None else read_status(pid)
    except OSError:  # that it cannot be seen says nothing about it
        return False
    return status is not None and status.is_stopped
