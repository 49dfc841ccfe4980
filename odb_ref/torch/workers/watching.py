"""Measures how long a process has done nothing, by looking at its status in the operating system again and again.

It never relies on the clock: if the whole job is stopped for a while, no process is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.process import BaseProcess

from odb_ref.torch.exchange.process_table import UNREADABLE, ProcessStatus, read_status


def _describe_stop(seconds: float) -> str:
    return f"has been stopped for {seconds:g} s (SIGSTOP, or a debugger)"


class Silence:
    """Measures how long a loader process has sent nothing while it was not working either.

    A process that uses its processor is not silent, however long it holds its interpreter lock.
    """

    def __init__(self, process: BaseProcess, *, is_heard: bool) -> None:
        self._pid = process.pid or 0
        self.is_heard = is_heard
        """True once the process has sent something, or should have."""
        self._status: ProcessStatus | None = None
        self.seconds = 0.0

    def end(self) -> None:
        """Notes that the process has sent something."""
        self.seconds, self.is_heard = 0.0, True

    def count(self, seconds: float) -> None:
        """Notes that the process has sent nothing for another ``seconds``."""
        status = read_status(self._pid)
        if status is UNREADABLE:
            return
        before, self._status = self._status, status
        if self._status is not None and self._status.is_busy_since(before):
            self.seconds = 0.0
        elif self.is_heard or (self._status is not None and self._status.is_stopped):
            self.seconds += seconds

    def describe(self) -> str:
        """Returns what the process is doing while it is silent."""
        if self._status is not None and self._status.is_stopped:
            return _describe_stop(self.seconds)
        return (
            f"has sent nothing and used no processor time for {self.seconds:g} s (timeout_s): something holds its interpreter "
            "lock, or it was forked while a lock was held"
        )


class Stops:
    """Measures how long the processes that read and collate for a loader process have been stopped.

    A process that is only slow is waited for, whatever it is waiting for. If the operating system cannot tell a slow process
    from a stopped one, use ``timeout=`` of the loader.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stopped_s: dict[int, float] = {}
        """The time for each process that was stopped at the last look."""

    def look(self, processes: Iterable[BaseProcess], seconds: float) -> tuple[BaseProcess, str] | None:
        """Checks the processes, ``seconds`` after the last time. Returns one stopped for too long, and how long in words."""
        stopped = {process.pid: process for process in processes if _is_stopped(process.pid)}
        self._stopped_s = {pid: self._stopped_s.get(pid, 0.0) + seconds for pid in stopped if pid is not None}
        for pid, stopped_s in self._stopped_s.items():
            if stopped_s >= self._limit_s:
                return stopped[pid], _describe_stop(stopped_s)
        return None


def _is_stopped(pid: int | None) -> bool:
    status = None if pid is None else read_status(pid)
    return status is not None and status.is_stopped
