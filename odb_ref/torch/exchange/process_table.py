"""What the operating system says of a process: the process itself need not answer, whose interpreter may be busy for long.

Linux only; elsewhere nothing is known of any process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BUSY_TICKS: Final = 3
"""Out of the 50 that half a second has: fewer are used by threads alone that ask for an interpreter lock and do not get it."""

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process at one moment."""

    state: str
    """As ``ps`` says it: R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    ticks: int
    """Processor time it has used so far, all threads, in clock ticks."""
    started: int
    """When it was started: two processes with one number differ in it."""

    @property
    def is_ended(self) -> bool:
        """True when nothing of it runs any more."""
        return self.state in "ZX"

    def is_busy_since(self, before: ProcessStatus | None) -> bool:
        """Returns True when it has used its processor since a status about half a second ago."""
        return before is not None and self.ticks >= before.ticks + BUSY_TICKS

    @property
    def is_stopped(self) -> bool:
        """True when a signal or a debugger has stopped it."""
        return self.state in "Tt"


def read_status(pid: int) -> ProcessStatus | None:
    """Returns a process of this process's own namespace; None when there is none of that number.

    Raises: OSError when it cannot be told, as when this process has no descriptor left to look with.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return None
    return ProcessStatus(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))


def compute_host() -> str:
    """Returns what processes have in common that see each other under one number; host names may be equal, these are not.

    Empty where it is not known.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def find_children(pid: int) -> list[int]:
    """Returns the processes that a process has started and that have not been waited for."""
    found: list[int] = []
    for path in _PROC.glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def kill_with_children(pid: int) -> None:
    """Kills a process and what it has started: its children first, or they would be nobody's."""
    for child in find_children(pid):
        kill_with_children(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
