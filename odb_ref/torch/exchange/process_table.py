"""Asks the operating system about a process. The process itself may not answer for long, because its interpreter is busy.

Linux only. On other systems nothing is known about any process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BUSY_TICKS: Final = 3
"""Half a second has 50 ticks. Threads that only ask for an interpreter lock and do not get it use fewer than this."""

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of a process at one point in time."""

    state: str
    """As in ``ps``: R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    ticks: int
    """The processor time of all its threads so far, in clock ticks."""
    started: int
    """The start time, which distinguishes processes that reuse a number."""

    @property
    def is_ended(self) -> bool:
        """True if nothing of it runs any more."""
        return self.state in "ZX"

    def is_busy_since(self, before: ProcessStatus | None) -> bool:
        """Returns True if it has used the processor since a status from about half a second ago."""
        return before is not None and self.ticks >= before.ticks + BUSY_TICKS

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped it."""
        return self.state in "Tt"


UNREADABLE: Final = ProcessStatus("?", 0, 0)
"""The status of a process of which nothing is known, for example because this process has no descriptor left."""


def read_status(pid: int) -> ProcessStatus | None:
    """Returns the status of a process in this process's own namespace, or None if there is no such process."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return None
    except OSError:
        return UNREADABLE
    return ProcessStatus(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))


def compute_host() -> str:
    """Returns a value shared by the processes that see each other's process numbers. Unlike host names, it is unique.

    Empty if it is unknown.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def find_children(pid: int) -> list[int]:
    """Returns the children of a process that have not been waited for."""
    found: list[int] = []
    for path in _PROC.glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def kill_with_children(pid: int) -> None:
    """Kills a process and its descendants. Children go first, because they would lose their parent otherwise."""
    for child in find_children(pid):
        kill_with_children(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
