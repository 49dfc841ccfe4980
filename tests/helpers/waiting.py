"""Waits for what happens in another thread or process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def is_in_time(is_over: Callable[[], object], limit_s: float = 10.0) -> bool:
    """Waits until it is over, or for ``limit_s`` seconds. Returns whether it is."""
    deadline = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def count_descriptors() -> int:
    """Returns how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
