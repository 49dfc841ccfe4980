"""Runs other programs, and takes what they print."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def capture(command: Sequence[str | Path], *, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Returns how a program ended, and what it printed. ``options`` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


@contextlib.contextmanager
def start(command: Sequence[str]) -> Iterator[Any]:
    """Yields a program, as a `subprocess.Popen`, in a session of its own. Kills what is left of this at the end."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True, text=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
