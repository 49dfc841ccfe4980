"""A slice of the soak: faults at random, in real processes. See tests/soak/faults.py.

``ODB_FAULT_RUNS`` sets how many runs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

RUNS = int(os.environ.get("ODB_FAULT_RUNS", "24"))


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * RUNS)
def test_nobody_hangs_and_the_survivors_agree() -> None:
    """In a process of its own: it forks, and starts a fork server."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.faults", "--runs", str(RUNS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
