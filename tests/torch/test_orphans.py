"""However a training process ends, the processes that its loader started end too."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

SCRIPT = """
import os, signal, sys, time
from odb_ref.torch import ODBDataLoader
from tests.torch.data import Numbers, collate

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
    loader = ODBDataLoader(Numbers(0, 100000), token_budget=60, window=16, collate_fn=collate, num_workers=2,
                           multiprocessing_context=sys.argv[1])
    for step, batch in enumerate(loader):
        if step == 2:
            print("ready", flush=True)
        if step > 2:
            time.sleep(0.05)
"""


def get_descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            child = int(path.parent.name)
            found |= {child} | get_descendants(child)
    return found


@pytest.mark.parametrize(
    ("how", "method"),
    [
        (signal.SIGINT, "fork"),
        (signal.SIGTERM, "fork"),
        (signal.SIGKILL, "fork"),
        pytest.param(signal.SIGKILL, "spawn", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "forkserver", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "forkserver", marks=pytest.mark.slow),
    ],
)
def test_no_process_outlives_the_training_process(how: signal.Signals, method: str) -> None:
    command = [sys.executable, "-c", SCRIPT, method]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        descendants = get_descendants(process.pid)
        assert len(descendants) >= 3
        process.send_signal(how)
        process.wait(15)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in descendants):
            time.sleep(0.1)
        assert not [pid for pid in descendants if Path(f"/proc/{pid}").exists()]
    finally:
        process.kill()
        process.communicate()
