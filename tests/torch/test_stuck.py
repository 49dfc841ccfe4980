"""User code that never returns, or ends silently: every rank is told, and no process stays."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_ref.torch import JobError
from odb_ref.torch.reading.description import describe
from tests.helpers.capture import capture, start
from tests.helpers.waiting import is_in_time
from tests.torch import data
from tests.torch.data import Numbers, Unspeakable, collate, go_wrong, listen, take
from tests.torch.ranks import Result, check_left, get_values, run_each, run_ranks

make_loader = partial(data.make_loader, shard="given", timeout_s=5)


def read_raising(rank: int, where: str, kind: str, num_workers: int) -> None:
    def combine(samples: list[Any]) -> Any:
        if where == "collate" and rank == 1 and any(sample["number"] == 12 for sample in samples):
            go_wrong(kind)
        return collate(samples)

    at = 12 if where == "data set" and rank == 1 else None
    with make_loader(Numbers(0, 40, bad=at, fault=kind), collate_fn=combine, num_workers=num_workers) as loader:
        for _ in loader:
            if num_workers:  # otherwise the trainer is ended, wherever the others are
                dist.all_reduce(torch.zeros(1))


def check_blamed(results: list[Result], rank: int, cause: str = "") -> None:
    assert {result.error for result in results} == {"JobError"}, results
    assert {result.rank for result in results} == {rank}, results
    assert cause in results[0].text, results


RAISING = [
    ("collate", "SystemExit", 0),
    ("collate", "Panic", 0),
    ("collate", "Panic", 1),
    ("collate", "Unspeakable", 0),
    ("collate", "Unspeakable", 1),
    ("collate", "os._exit", 1),
    ("data set", "SystemExit", 0),
    ("data set", "Panic", 0),
    ("data set", "KeyboardInterrupt", 0),
    ("data set", "exit", 1),
    ("data set", "Panic", 1),
    ("data set", "Unspeakable", 1),
]
# Torch's workers check every five seconds whether another has ended this way.
LATE = pytest.param([("data set", "os._exit", 2)], marks=pytest.mark.deep)


@pytest.mark.parametrize("cases", [RAISING, LATE], ids=["soon", "late"])
def test_what_is_no_exception_ends_every_rank(cases: list[tuple[str, str, int]]) -> None:
    for case, results in zip(cases, run_each(2, read_raising, cases), strict=True):
        where, kind, num_workers = case
        assert max(result.seconds for result in results) < 8, case
        if not num_workers and kind != "Unspeakable":
            assert results.pop(1).error == kind, case  # the consumer's own thread reads
        check_blamed(results, 1)
        if kind in ("SystemExit", "Panic") and not (where == "data set" and num_workers):
            assert kind in results[0].text, case


def test_what_cannot_be_described_is_described() -> None:
    assert describe(Unspeakable()) == "Unspeakable, whose text raises Panic"


SCRIPT = """
import atexit, time
atexit.register(lambda: print(time.monotonic(), flush=True))  # the last of all: from then on it is the interpreter that ends
import signal, sys, threading
from odb_ref.torch import Batching, ODBDataLoader
from tests.torch.data import Numbers, collate

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
data = Numbers(0, 400, bad=range(30, 400), fault="block")
loader = ODBDataLoader(
    data, token_budget=60, collate_fn=collate, num_workers=int(sys.argv[1]), batching=Batching(window=8)
)
batches = iter(loader)
next(batches)
print("ready", flush=True)
for batch in batches:
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_control_c_ends_a_process_whose_data_set_blocks(num_workers: int) -> None:
    with start([sys.executable, "-c", SCRIPT, str(num_workers)]) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert float(process.stdout.readline()) - began < 3  # 0.7 s on an idle machine; 11 s before
        assert process.wait(30) == -signal.SIGINT
        check_left({process.pid})


def test_a_rank_that_fails_does_not_wait_for_one_whose_data_set_blocks() -> None:
    def read_blocking(rank: int) -> None:
        bad, fault = (range(12, 400), "block") if rank == 0 else (12, "Panic")
        take(make_loader(Numbers(0, 400, bad=bad, fault=fault), num_workers=1, name="one"))

    results = run_ranks(2, read_blocking, timeout_s=30)
    check_blamed(results, 1, "Panic")
    assert max(result.seconds for result in results) < 8


def hold_the_lock(seconds: int, is_busy: bool = False) -> None:
    """Holds the interpreter lock asleep, or, a second or two at a time, at work."""
    if not is_busy:
        ctypes.PyDLL(None).sleep(seconds)
        return
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _ = 7**4_000_000


class Holding(Numbers):
    """Takes its time when the loader process asks whether it reads many samples at once."""

    def __init__(self, seconds: int, is_busy: bool) -> None:
        super().__init__(0, 40)
        self.seconds, self.is_busy = seconds, is_busy

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__" and multiprocessing.current_process().name == "odb-loader":
            hold_the_lock(self.seconds, self.is_busy)
        raise AttributeError(name)


def run_pairs(function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[list[Result]]:
    """Returns by case the results of two ranks in their own group. All cases wait at once."""
    results = run_ranks(2 * len(cases), call_in_pairs, function, cases)
    return [results[first : first + 2] for first in range(0, len(results), 2)]


def call_in_pairs(rank: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> Any:
    groups = [dist.new_group([2 * number, 2 * number + 1]) for number in range(len(cases))]
    return function(rank % 2, {"process_group": groups[rank // 2], "is_apart": True}, *cases[rank // 2])


def read_holding(rank: int, group: dict[str, Any], seconds: int, limit_s: float, is_busy: bool) -> int:
    samples = Holding(seconds if rank == 1 else 0, is_busy)
    return len(take(make_loader(samples, num_workers=1, loader_timeout_s=limit_s, **group), list))


def test_a_loader_process_that_holds_its_lock_is_waited_for_as_long_as_it_may() -> None:
    patient, busy, idle = run_pairs(read_holding, [(3, 60.0, False), (3, 1.0, True), (4, 1.0, False)])
    get_values(patient)
    get_values(busy)
    check_blamed(idle, 1, "interpreter lock")


def test_a_killed_loader_process_is_noticed_before_its_worker_ends(tmp_path: Path) -> None:
    def cling(index: int) -> None:
        """Holds the lock of a worker, and with it everything that the worker has open."""
        (tmp_path / "held").touch()
        hold_the_lock(6)

    with make_loader(Numbers(0, 400, bad=300, fault=cling), num_workers=1) as loader:
        batches = iter(loader)
        while not (tmp_path / "held").exists():
            next(batches)
        (process,) = multiprocessing.active_children()
        process.kill()
        began = time.monotonic()
        with pytest.raises(JobError, match="the loader process exited unexpectedly"):
            list(batches)
    assert time.monotonic() - began < 4


def test_a_loader_whose_data_set_blocks_can_be_closed() -> None:
    loader = make_loader(Numbers(0, 400, bad=range(200, 400), fault="block"), num_workers=1)
    next(iter(loader))
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 3


def train_holding(rank: int, group: dict[str, Any], seconds: int, is_busy: bool) -> int:
    steps = 0
    with make_loader(Numbers(0, 60), timeout_s=2, **group) as loader:
        for _ in loader:
            if rank == 1 and steps == 2:
                hold_the_lock(seconds, is_busy)
            steps += 1
    return steps


def test_a_trainer_that_holds_its_lock_is_waited_for_while_it_works_and_else_named() -> None:
    busy, idle = run_pairs(train_holding, [(4, True), (4, False)])
    get_values(busy)
    check_blamed(idle, 1, "something holds its interpreter lock (Faults(timeout_s=) raises the limit)")


def stop_until(is_over: Callable[[], bool]) -> None:
    """Stops this process, which a child of it wakes."""
    if os.fork() == 0:
        is_in_time(is_over)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.wait()


def test_a_loader_is_closed_whole_beside_a_rank_that_is_stopped(tmp_path: Path) -> None:
    def close_beside_one_that_is_stopped(rank: int) -> list[str]:
        """Returns the threads that are left."""
        loader = make_loader(Numbers(0, 60), timeout_s=30)
        next(iter(loader))
        if rank == 1:
            stop_until((tmp_path / "closed").exists)
        time.sleep(0.5)
        loader.close()
        left = [thread.name for thread in threading.enumerate() if thread.name == "odb-exchange"]
        (tmp_path / "closed").touch()
        return left

    assert get_values(run_ranks(2, close_beside_one_that_is_stopped, timeout_s=30)) == [[], []]


def wait_and_listen(rank: int, what: str, num_workers: int, text: str, folder: Path) -> list[str]:
    """Returns what is logged while rank 2 keeps the others waiting, until each has logged it."""

    def note(line: str) -> None:
        if re.search(f"rank {rank} waits for rank 2, which {text}", line):
            (folder / str(rank)).touch()

    lines = listen(note)

    def have_both() -> bool:
        return len(os.listdir(folder)) == 2

    def combine(samples: list[Any]) -> Any:
        if rank == 2 and what == "collate" and any(sample["number"] == 30 for sample in samples):
            is_in_time(have_both)
        return collate(samples)

    is_slow = what == "read" and rank == 2
    slow = Numbers(0, 60, bad=20 if is_slow else None, fault=lambda index: is_in_time(have_both))
    options = {"collate_fn": combine, "num_workers": num_workers, "timeout_s": 6 if what == "stop" else 1}
    with make_loader(slow, **options) as loader:
        for step, _ in enumerate(loader):
            if rank == 2 and what == "trainer" and step == 3:
                is_in_time(have_both)
            if rank == 2 and what == "stop" and step == 3:
                stop_until(have_both)
    return lines


WAITED_FOR = [
    ("read", 0, r"is reading, with \d+ samples so far"),
    ("read", 1, r"is reading, with \d+ samples so far"),
    ("collate", 0, r"is .*collating step \d+"),
    ("collate", 1, r"is .*collating step \d+"),
    ("trainer", 0, "is waiting for its trainer, which holds step 3"),
    ("stop", 0, r"has not answered for \d s: its process is stopped"),
]


def test_a_rank_that_waits_says_for_whom(tmp_path: Path) -> None:
    cases = [(*case, tmp_path / str(number)) for number, case in enumerate(WAITED_FOR)]
    for *_, folder in cases:
        folder.mkdir()
    for (what, num_workers, _, folder), results in zip(cases, run_each(3, wait_and_listen, cases), strict=True):
        said = {path.name for path in folder.iterdir()}
        assert said == {"0", "1"}, (what, num_workers, get_values(results))


LEAVER = """
import sys, time
import torch.distributed as dist
from tests.torch.data import Numbers, make_loader

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=2)
loader = make_loader(Numbers(0, 400), shard="given", timeout_s=600, name="one")
for step, batch in enumerate(loader):
    if step == 3:
        time.sleep(0.3)
        raise ValueError("the user's own")
"""


def test_a_leave_that_nobody_takes_note_of_ends_with_the_users_exception(tmp_path: Path) -> None:
    """The leaver is a program, because a forked rank does not end as an interpreter does."""

    def read_and_stop() -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=1, world_size=2)
        for step, _ in enumerate(make_loader(Numbers(0, 400), timeout_s=600, name="one")):
            if step == 3:
                os.kill(os.getpid(), signal.SIGSTOP)

    other = multiprocessing.get_context("fork").Process(target=read_and_stop)
    other.start()
    try:
        left = capture([sys.executable, "-c", LEAVER, str(tmp_path / "store")], timeout=100)
        assert left.returncode == 1, left.stderr
        assert left.stderr.rstrip().endswith("ValueError: the user's own")
    finally:
        other.kill()
        other.join()
