"""What never comes back, and what ends without a word: every rank hears of it, and no process stays."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_ref.torch import Batching, ODBDataLoader
from odb_ref.torch.reading.description import describe
from tests.helpers.options import nested
from tests.torch.data import Numbers, Unspeakable, collate, go_wrong
from tests.torch.ranks import Result, get_values, run_ranks

SETTINGS: dict[str, Any] = {"token_budget": 60, "window": 8, "shard": "given", "timeout_s": 5}


def read_raising(rank: int, where: str, kind: str, num_workers: int) -> None:
    def combine(samples: list[Any]) -> Any:
        if where == "collate" and rank == 1 and any(sample["number"] == 12 for sample in samples):
            go_wrong(kind)
        return collate(samples)

    at = 12 if where == "data set" and rank == 1 else None
    options = SETTINGS | {"collate_fn": combine, "num_workers": num_workers}
    with ODBDataLoader(Numbers(0, 40, bad=at, fault=kind), **nested(**options)) as loader:
        for _ in loader:
            if num_workers:  # else it is the trainer that is ended, wherever the others are
                dist.all_reduce(torch.zeros(1))


def check_blamed(results: list[Result], rank: int, cause: str = "") -> None:
    assert {result.error for result in results} == {"JobError"}, results
    assert {result.rank for result in results} == {rank}, results
    assert cause in results[0].text, results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "kind", "num_workers"),
    [
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
        ("data set", "os._exit", 2),
    ],
)
def test_what_is_no_exception_ends_every_rank(where: str, kind: str, num_workers: int) -> None:
    results = run_ranks(2, read_raising, where, kind, num_workers, timeout_s=30)
    assert max(result.seconds for result in results) < 8
    if not num_workers and kind != "Unspeakable":
        assert results.pop(1).error == kind  # it is the consumer's own thread that reads
    check_blamed(results, 1)
    if kind in ("SystemExit", "Panic") and not (where == "data set" and num_workers):
        assert kind in results[0].text


def test_what_cannot_be_described_is_described() -> None:
    assert describe(Unspeakable()) == "Unspeakable, whose text raises Panic"


class Blocking(Numbers):
    """As on a network mount that is gone: from one sample on nothing comes back."""

    def __init__(self, count: int, at: int | None) -> None:
        super().__init__(0, count)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if self.at is not None and index >= self.at:
            threading.Event().wait()
        return super().__getitem__(index)


def read_blocking(rank: int, num_workers: int) -> None:
    dataset: Numbers = Blocking(400, 12) if rank == 0 else Numbers(0, 400, bad=12, fault="Panic")
    with ODBDataLoader(
        dataset, **nested(num_workers=num_workers, collate_fn=collate, name="one", **SETTINGS)
    ) as loader:
        list(loader)


SCRIPT = """
import atexit, time
atexit.register(lambda: print(time.monotonic(), flush=True))  # the last of all: from then on it is the interpreter that ends
import signal, sys, threading
from odb_ref.torch import Batching, ODBDataLoader
from tests.torch.data import collate
from tests.torch.test_stuck import Blocking

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
loader = ODBDataLoader(
    Blocking(400, 30), token_budget=60, collate_fn=collate, num_workers=int(sys.argv[1]), batching=Batching(window=8)
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
    command = [sys.executable, "-c", SCRIPT, str(num_workers)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert float(process.stdout.readline()) - began < 3  # 0.7 s on an idle machine; 11 s before
        assert process.wait(30) == -signal.SIGINT
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("processes of its own are left")
    finally:
        process.kill()
        process.communicate()


def test_a_rank_that_fails_does_not_wait_for_one_whose_data_set_blocks() -> None:
    results = run_ranks(2, read_blocking, 1, timeout_s=30)
    check_blamed(results, 1, "Panic")
    assert max(result.seconds for result in results) < 8


def hold_the_lock(seconds: int) -> None:
    """Sleeps, and holds the interpreter lock meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


class Holding(Numbers):
    """Is asked for its length in the loader process, where it takes its time."""

    def __init__(self, seconds: int, is_busy: bool) -> None:
        super().__init__(0, 40)
        self.seconds, self.is_busy = seconds, is_busy

    def __len__(self) -> int:
        if multiprocessing.current_process().name == "odb-loader":
            until = time.monotonic() + self.seconds
            while self.is_busy and time.monotonic() < until:
                _ = 7**4_000_000  # holds the lock for a second or two, and uses the processor
            if not self.is_busy:
                hold_the_lock(self.seconds)
        return super().__len__()


def read_holding(rank: int, seconds: int, limit_s: float, is_busy: bool) -> int:
    data = Holding(seconds if rank == 1 else 0, is_busy)
    options = SETTINGS | {"collate_fn": collate, "num_workers": 1, "loader_timeout_s": limit_s}
    with ODBDataLoader(data, **nested(**options)) as loader:
        return sum(1 for _ in loader)


@pytest.mark.slow
def test_a_loader_process_that_holds_its_lock_is_waited_for_as_long_as_it_may() -> None:
    results = run_ranks(2, read_holding, 4, 60.0, False)
    assert not any(result.error for result in results), results
    results = run_ranks(2, read_holding, 5, 1.0, True)
    assert not any(result.error for result in results), results
    results = run_ranks(2, read_holding, 8, 2.0, False)
    check_blamed(results, 1, "interpreter lock")


def test_a_loader_whose_data_set_blocks_can_be_closed() -> None:
    loader = ODBDataLoader(
        Blocking(400, 200), token_budget=60, num_workers=1, collate_fn=collate, batching=Batching(window=8)
    )
    next(iter(loader))
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 3


def train_holding(rank: int, seconds: int, is_busy: bool) -> int:
    steps = 0
    with ODBDataLoader(Numbers(0, 60), **nested(**(SETTINGS | {"timeout_s": 2, "collate_fn": collate}))) as loader:
        for _ in loader:
            if rank == 1 and steps == 2:
                until = time.monotonic() + seconds
                while is_busy and time.monotonic() < until:
                    _ = 7**4_000_000
                if not is_busy:
                    hold_the_lock(seconds)
            steps += 1
    return steps


@pytest.mark.slow
def test_a_trainer_that_holds_its_lock_is_waited_for_while_it_works_and_else_named() -> None:
    results = run_ranks(2, train_holding, 6, True)
    assert not any(result.error for result in results), results
    results = run_ranks(2, train_holding, 6, False)
    check_blamed(results, 1, "something holds its interpreter lock")


def wait_and_listen(rank: int, what: str, num_workers: int) -> list[str]:
    """What rank 0 logs while rank 2 keeps it waiting."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("odb_ref").addHandler(handler)

    def combine(samples: list[Any]) -> Any:
        if rank == 2 and what == "collate" and any(sample["number"] == 30 for sample in samples):
            time.sleep(4)
        return collate(samples)

    slow = Slow(60, 20 if what == "read" and rank == 2 else None)
    options = SETTINGS | {"collate_fn": combine, "num_workers": num_workers, "timeout_s": 6 if what == "stop" else 1}
    with ODBDataLoader(slow, **nested(**options)) as loader:
        for step, _ in enumerate(loader):
            if rank == 2 and what == "trainer" and step == 3:
                time.sleep(4)
            if rank == 2 and what == "stop" and step == 3:
                subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
    return lines


class Slow(Numbers):
    """Takes its time for one sample."""

    def __init__(self, count: int, at: int | None) -> None:
        super().__init__(0, count)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            time.sleep(4)
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "num_workers", "text"),
    [
        ("read", 0, r"rank 0 waits for rank 2, which is reading, with \d+ samples so far"),
        ("read", 1, r"rank 0 waits for rank 2, which is reading, with \d+ samples so far"),
        ("collate", 0, r"rank 0 waits for rank 2, which is .*collating step \d+"),
        ("collate", 1, r"rank 0 waits for rank 2, which is .*collating step \d+"),
        ("trainer", 0, r"rank 0 waits for rank 2, which is waiting for its trainer, which holds step 3"),
        ("stop", 0, r"rank 0 waits for rank 2, which has not answered for \d s: its process is stopped"),
    ],
)
def test_a_rank_that_waits_says_for_whom(what: str, num_workers: int, text: str) -> None:
    values = get_values(run_ranks(4, wait_and_listen, what, num_workers))
    for rank in (0, 1, 3):
        expected = text.replace("rank 0", f"rank {rank}")
        assert any(re.search(expected, line) for line in values[rank]), values[rank]


LEAVER = """
import os, signal, sys, threading, time
import torch.distributed as dist
from odb_ref.torch import Batching, ODBDataLoader
from tests.torch.data import Numbers, collate

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
loader = ODBDataLoader(Numbers(0, 400), token_budget=60, collate_fn=collate, shard="given", batching=Batching(window=8))
for step, batch in enumerate(loader):
    if step == 3:
        if rank == 0:
            time.sleep(0.3)
            raise ValueError("the user's own")
        os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_leave_that_nobody_takes_note_of_ends_with_the_users_exception(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVER, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        _, text = ranks[0].communicate(timeout=100)
        assert ranks[0].returncode == 1, text
        assert text.rstrip().endswith("ValueError: the user's own")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
