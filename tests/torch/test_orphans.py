"""However a training process ends, the processes that its loader started also end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from odb_ref.torch.workers.serving import _is_orphaned
from tests.helpers.capture import start
from tests.helpers.waiting import is_in_time
from tests.torch.ranks import check_left, find_sessions

SCRIPT = """
import os, signal, sys, time
from odb_ref.torch import Batching, ODBDataLoader
from tests.torch.data import Numbers, collate

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
    loader = ODBDataLoader(
        Numbers(0, 100000),
        token_budget=60,
        collate_fn=collate,
        num_workers=2,
        multiprocessing_context=sys.argv[1],
        batching=Batching(window=16),
    )
    for step, batch in enumerate(loader):
        if step == 2:
            print("ready", flush=True)
        if step > 2:
            time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "method"),
    [
        (signal.SIGINT, "fork"),
        (signal.SIGTERM, "fork"),
        (signal.SIGKILL, "fork"),
        pytest.param(signal.SIGKILL, "spawn", marks=pytest.mark.deep),
        pytest.param(signal.SIGINT, "forkserver", marks=pytest.mark.deep),
        pytest.param(signal.SIGKILL, "forkserver", marks=pytest.mark.deep),
    ],
)
def test_no_process_outlives_the_training_process(how: signal.Signals, method: str) -> None:
    with start([sys.executable, "-c", SCRIPT, method]) as process:
        assert process.stdout.readline() == "ready\n"
        assert len(find_sessions({process.pid})) >= 4
        process.send_signal(how)
        process.wait(15)
        check_left({process.pid})


def test_a_parent_is_gone_when_the_operating_system_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe that multiprocessing checks may have been closed by mistake."""
    child = subprocess.Popen(["sleep", "30"])
    believed = SimpleNamespace(pid=child.pid, is_alive=lambda: False)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: believed)
    try:
        assert not _is_orphaned(None)
    finally:
        child.kill()
    assert is_in_time(lambda: _is_orphaned(None), 2)  # even though it has not been waited for yet
    child.wait()
    assert _is_orphaned(None)
    assert _is_orphaned(os.getppid() + 1)
    assert not _is_orphaned(os.getppid())
