"""Without what only Linux has, everything can be imported and one process trains. Without any package the checker judges."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.capture import capture
from tests.helpers.world import make_configs, run_by_arrival

HIDE = """
import importlib, os, pkgutil, select, signal, socket, sys, warnings
for name in ("torch", "torch.distributed", "torch.multiprocessing", "torch.utils.data", *sys.argv[1:]):
    try:
        importlib.import_module(name)  # has its own ways on Windows
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
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # of a framework that is not installed, which is said
            assert "pip install 'odb-ref[" in str(error), error
"""
FRAMEWORKS = ("accelerate", "transformers.trainer", "transformers.loss.loss_utils", "lightning.pytorch")
TRAIN = """
import odb_ref, torch
samples = [{"input_ids": torch.ones(number % 7 + 1, dtype=torch.long)} for number in range(40)]
def collate(part):
    return torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in part], batch_first=True)
with odb_ref.ODBDataLoader(samples, token_budget=30, collate_fn=collate, loss=odb_ref.Loss(scaling="samples")) as loader:
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
from odb_sim.verify.language import load_judged
from odb_sim.verify.rule import check_bounds
assert "by a proof" in check_bounds(load_judged("odb")).ranges
"""


def run(program: str, *loaded: str) -> None:
    done = capture([sys.executable, "-c", HIDE + program, *loaded])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_everything_is_imported_without_what_only_linux_has() -> None:
    pytest.importorskip("torch")
    run(IMPORT, *FRAMEWORKS)


def test_one_process_simulates_and_trains_without_what_only_linux_has() -> None:
    run(SIMULATE + (TRAIN if find_spec("torch") else ""))


BARE = """
import json, sys
for name in ("numpy", "torch", "simpy", "networkx", "rich"):
    sys.modules[name] = None
from odb_sim.cli.main import build_parser, main
assert main(["check", sys.argv[1]]) == 0
assert main(["simulate", "gsm8k", "--ranks", "2", "--token-budget", "4096"]) == 2
assert "not here: pip install" in build_parser().format_help()
import odb_ref, odb_ref.plan, odb_ref.conformance
odb_ref.plan_all([3, 4, 5], ranks=2, budget=8)
try:
    odb_ref.ODBDataLoader
except ImportError as error:
    assert "needs torch" in str(error)
"""


def test_the_checker_and_the_planner_need_python_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace.ndjson"
    run_by_arrival([[3, 5], [4]], make_configs(2), trace=trace)
    done = capture([sys.executable, "-c", BARE, str(trace)])
    assert done.returncode == 0, done.stderr
    assert done.stderr == "odb-ref simulate: needs the simulator: pip install 'odb-ref[sim]'\n"
