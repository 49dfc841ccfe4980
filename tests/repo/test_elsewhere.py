"""Where Windows and macOS lack what Linux has: everything can be imported, and one process trains and simulates."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDE = """
import importlib, os, pkgutil, select, signal, socket, sys, warnings
try:
    import torch  # has its own ways on Windows
    import torch.distributed, torch.multiprocessing, torch.utils.data
except ImportError:
    pass
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for module, names in (
    (os, ("fork", "register_at_fork", "getppid", "killpg", "setsid", "waitid")),
    (select, ("poll", "epoll")),
    (signal, ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGUSR1", "SIGALRM", "setitimer", "pthread_sigmask")),
    (socket, ("AF_UNIX", "MSG_DONTWAIT", "SO_REUSEPORT")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
IMPORT = """
for root in map(importlib.import_module, ("odb_ref", "odb_sim")):
    for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        if module.name.split(".")[1:2] not in ([], ["integrations"], ["compat"]) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
TRAIN = """
import odb_ref
samples = [{"input_ids": torch.ones(number % 7 + 1, dtype=torch.long)} for number in range(40)]
def collate(part):
    return torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in part], batch_first=True)
with odb_ref.ODBDataLoader(samples, token_budget=30, collate_fn=collate, loss_scaling="samples") as loader:
    assert sum(info.local_samples for _, info in loader.steps()) == 40
os.name = "nt"
try:
    odb_ref.ODBDataLoader(samples, token_budget=30, collate_fn=collate, num_workers=1)
except odb_ref.UsageError as error:
    assert "num_workers=1 needs Linux or macOS" in str(error)
else:
    raise AssertionError("workers are not refused")
"""
SIMULATE = """
from odb_sim.cli.main import main
assert main(["simulate", "gsm8k", "--ranks", "2", "--samples", "200", "--token-budget", "4096"]) == 0
assert main(["verify"]) == 2
"""


@pytest.mark.parametrize("program", [IMPORT, TRAIN, SIMULATE], ids=["import", "train", "simulate"])
def test_it_works_without_what_only_linux_has(program: str) -> None:
    if program != SIMULATE:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", HIDE + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
