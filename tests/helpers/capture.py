"""Runs other programs, and keeps what they print."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def capture(command: Sequence[str | Path], *, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Returns how a program ended, and what it printed. ``options`` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)
