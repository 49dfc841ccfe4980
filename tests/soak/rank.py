"""One rank of a run of the soak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from odb_ref.torch import ODBDataLoader, pop_step_info
from odb_ref.torch.exchange.process_table import find_children
from tests.soak.case import STOP_TIMEOUT_S, Case, Fault, Victim
from tests.torch.data import collate, make_sample

SHARD = 1000
PAUSE_S = 0.7


class Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


class Unspeakable(Exception):
    """Neither its text nor a pickle of it can be had."""

    def __str__(self) -> str:
        raise Panic("no text")

    def __reduce__(self) -> Any:
        raise SystemExit(4)


def go_wrong(error: str) -> None:
    match error:
        case "SystemExit":
            sys.exit(3)
        case "exit":
            sys.exit(0)
        case "Panic":
            raise Panic("it panicked")
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "Unspeakable":
            raise Unspeakable
        case "StopIteration":
            raise StopIteration
        case "MemoryError":
            raise MemoryError("no memory")
        case _:
            raise ValueError("bad row")


@dataclass
class Samples(Dataset[Any]):
    """The samples of one rank, told apart from those of all others by their numbers."""

    case: Case
    rank: int

    def __len__(self) -> int:
        return self.case.sizes[self.rank]

    def __getitem__(self, index: int) -> Any:
        case = self.case
        # The first: one behind its window would never be asked for, while another rank's data set blocks.
        if case.fault is Fault.BLOCK and self.rank == case.failing and index == 0:
            raise ValueError("bad row")
        if index == case.sample and self.rank == case.culprit:
            if case.fault is Fault.READ:
                go_wrong(case.error)
            if case.fault is Fault.BLOCK:
                threading.Event().wait()
            if case.fault is Fault.HOLD and case.step % 2:
                ctypes.PyDLL(None).sleep(1)
        if case.fault is Fault.SLOW and self.rank == case.culprit:
            time.sleep(0.01)
        return make_sample(SHARD * self.rank + index)


@dataclass(frozen=True)
class Combine:
    """The collate function of one rank."""

    case: Case
    rank: int

    def __call__(self, samples: list[Any]) -> Any:
        case = self.case
        is_here = any(sample["number"] == SHARD * case.culprit + case.sample for sample in samples)
        if is_here and self.rank == case.culprit:
            if case.fault is Fault.COLLATE:
                go_wrong(case.error)
            if case.fault is Fault.HOLD and not case.step % 2:
                ctypes.PyDLL(None).sleep(1)
        return collate(samples)


@dataclass
class Found:
    """What came of one rank."""

    numbers: list[list[int]] = field(default_factory=list)
    """Of the samples trained on, epoch by epoch."""
    steps: int = 0
    error: str = ""
    text: str = ""
    blamed: int | None = None
    is_struck: bool = False
    """True when it has come to the step at which something was to happen."""
    left: str = ""
    seconds: float = 0.0


def be_rank(case: Case, rank: int) -> Found:
    """Trains, or does what it is to do wrong."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = Found()
    is_mine = rank == case.culprit
    if is_mine and case.fault is Fault.NEVER:
        time.sleep(STOP_TIMEOUT_S + 1)  # its store is not to go with it
        return found
    if is_mine and case.fault is Fault.LATE:
        time.sleep(0.7)
    before = count_descriptors()
    began = time.monotonic()
    try:
        train(case, rank, found)
    except BaseException as error:
        found.error, found.blamed = type(error).__name__, getattr(error, "rank", None)
        found.text = "" if isinstance(error, Unspeakable) else str(error)[:300]
        del error
    found.seconds = time.monotonic() - began
    found.left = find_left(case, before)
    return found


def train(case: Case, rank: int, found: Found) -> None:
    is_mine = rank == case.culprit
    options: dict[str, Any] = {
        "token_budget": 60 + (is_mine and case.fault is Fault.CONFIG),
        "window": case.window,
        "depth": case.depth,
        "transport": case.transport,
        "accumulation_steps": case.accumulation_steps,
        "num_workers": case.workers,
        "timeout_s": case.timeout_s,
        "loader_timeout_s": STOP_TIMEOUT_S if case.fault is Fault.STOP else 20.0,
        "shard": "given",
        "idle_sample": make_sample(1),
        "collate_fn": Combine(case, rank),
    }
    if case.workers:
        options |= {"multiprocessing_context": case.method, "persistent_workers": case.is_persistent}
    with ODBDataLoader(Samples(case, rank), **options) as loader:
        for _ in range(case.epochs):
            found.numbers.append([])
            for batch in loader:
                info = pop_step_info(batch)
                found.numbers[-1] += [] if info.is_idle else batch["numbers"]
                found.steps += 1
                if info.step == case.step and (is_mine or case.fault is Fault.LEAVE_ALL):
                    found.is_struck = True
                    if not strike(case):
                        break
                if case.is_coupled:
                    dist.all_reduce(torch.zeros(1))
                elif case.fault is Fault.SLOW and is_mine:
                    time.sleep(0.02)


def strike(case: Case) -> bool:
    """What this rank does at the step; False: it leaves the loop."""
    match case.fault:
        case Fault.KILL | Fault.STOP | Fault.PAUSE:
            sign = signal.SIGKILL if case.fault is Fault.KILL else signal.SIGSTOP
            pid = find_victim(case.victim)
            if case.fault is Fault.PAUSE:
                subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {pid} 2>&-"], start_new_session=False)
            os.kill(pid, sign)
        case Fault.LEAVE | Fault.LEAVE_ALL:
            return False
        case Fault.TRAINER:
            go_wrong(case.error)
        case Fault.INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
    return True


def find_victim(victim: Victim) -> int:
    """The process; where there is no such any more, one above it."""
    loader = next((child for child in multiprocessing.active_children() if child.name == "odb-loader"), None)
    if victim is Victim.RANK:
        return os.getpid()
    if loader is None or loader.pid is None:
        return subprocess.Popen(["sleep", "30"]).pid  # the loader has done its part: nobody misses it
    workers = find_children(loader.pid) if victim is Victim.WORKER else []
    return workers[0] if workers else loader.pid


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def find_left(case: Case, before: int) -> str:
    """What this rank still has of its loader, once it is closed."""
    # What multiprocessing keeps for other ways to start a process is not ours.
    allowance = before + (0 if case.method == "fork" else 4)
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("odb-")]
        threads = [name for name in names if name != "odb-cleanup"]
        more = count_descriptors() - allowance
        if not threads and more <= 0:
            return ""
        if time.monotonic() > deadline:
            return f"threads {threads}, {more} descriptors" + _describe_descriptors()
        time.sleep(0.05)


def _describe_descriptors() -> str:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return f": {sorted(links)}"
