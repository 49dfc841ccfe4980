"""Runs a program as ``torchrun`` would, in processes forked from this one, so that they need not import torch again."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import re
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def find_port() -> int:
    """Returns a port of this machine without a listener, outside the range that the system assigns to outgoing connections."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def run_program(script: Path, *arguments: str, folder: Path, ranks: int = 0, timeout_s: float = 180) -> str:
    """Returns what all ranks print when they run the script in the folder. Without ``ranks`` it runs in one plain process.

    Raises: AssertionError with their error output when one of them fails, or takes too long.
    """
    importlib.import_module("torch._dynamo")  # takes seconds: once here, not in each process that uses optimizers
    context = multiprocessing.get_context("fork")
    port = find_port()
    with tempfile.TemporaryDirectory() as kept:
        processes = [
            context.Process(target=_run, args=(script, arguments, folder, Path(kept), rank, ranks, port, timeout_s))
            for rank in range(ranks or 1)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        out, err = ((Path(kept) / name).read_text() for name in ("out", "err"))
    codes = [process.exitcode for process in processes]
    # Stacks of the ranks end with the frames of this process, which forked them.
    lines = [line for line in err.splitlines() if not re.search(r"/(_pytest|pluggy|xdist|execnet)/", line)]
    said = "\n".join(lines)
    assert not any(codes), f"exit codes {codes}: {said[-6000:]}"
    return out


def _run(
    script: Path,
    arguments: tuple[str, ...],
    folder: Path,
    kept: Path,
    rank: int,
    ranks: int,
    port: int,
    timeout_s: float,
) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(kept / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    # Threads of earlier tests' objects do not exist in this process. Collecting one of their process groups would end it.
    gc.freeze()
    if "accelerate" in sys.modules:  # state that an earlier test left in this process
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    # A process that is killed for taking too long first prints where it waits.
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=2)
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if ranks:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
        }
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    with contextlib.ExitStack() as stack:
        stack.callback(sys.stdout.flush)
        runpy.run_path(str(script), run_name="__main__")
