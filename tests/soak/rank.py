"""One rank of a world of the soak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from odb_ref.torch import ODBDataLoader
from odb_ref.torch.exchange.process_table import find_children, read_status
from tests.helpers.options import nested
from tests.helpers.waiting import count_descriptors, is_in_time
from tests.soak.case import SHORT_TIMEOUT_S, WAITED_FOR, Case, Fault, Victim
from tests.torch.data import Unspeakable, collate, go_wrong, make_sample

SHARD = 1000
PAUSE_S = 0.7
BLIP_S = 1.2

Key = tuple[int, str, str]
"""A sample's number, where it fails, and with which error."""


class Samples(Dataset[Any]):
    """Samples that do what their key says."""

    def __getitem__(self, key: Key) -> Any:
        number, what, error = key
        match what:
            case "read":
                go_wrong(error)
            case "block":
                threading.Event().wait()
            case "hold":
                ctypes.PyDLL(None).sleep(1)
            case "slow":
                time.sleep(0.01)
        return make_sample(number) | {"what": what, "error": error}


def combine(samples: list[Any]) -> Any:
    """Collates a batch, unless the key of one of its samples says otherwise."""
    for sample in samples:
        if sample["what"] == "collate":
            go_wrong(sample["error"])
        elif sample["what"] == "hold collating":
            ctypes.PyDLL(None).sleep(1)
    return collate(samples)


@dataclass
class Feed:
    """The sampler of a rank: the keys of one case after another."""

    rank: int
    case: Case | None = None

    def __iter__(self) -> Iterator[Key]:
        case, rank = self.case, self.rank
        if case is None:
            return
        is_mine = rank == case.culprit
        if is_mine and case.fault is Fault.SAMPLER:
            go_wrong(case.error)
        for index in range(case.sizes[rank]):
            number = SHARD * rank + index
            # The first sample, because one beyond its window would never be read while another rank's data set blocks.
            if case.fault is Fault.BLOCK and rank == case.failing and index == 0:
                yield number, "read", "ValueError"
            elif is_mine and case.fault is Fault.SLOW:
                yield number, "slow", ""
            elif is_mine and index == case.sample:
                yield number, _find_what(case), case.error
            else:
                yield number, "", ""


def _find_what(case: Case) -> str:
    match case.fault:
        case Fault.READ | Fault.COLLATE | Fault.BLOCK:
            return str(case.fault)
        case Fault.HOLD:
            return "hold" if case.step % 2 else "hold collating"
        case _:
            return ""


@dataclass
class Found:
    """The result of a rank in a case."""

    numbers: list[int] = field(default_factory=list)
    """The numbers of the samples trained on."""
    steps: int = 0
    error: str = ""
    text: str = ""
    blamed: int | None = None
    left: str = ""
    seconds: float = 0.0


class Rank:
    """A rank, through all cases of its world. ``cut`` and ``heal`` are commands for the link of its host."""

    def __init__(self, rank: int, cut: str = "", heal: str = "") -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.rank = rank
        self._cut, self._heal = cut, heal
        self._feed = Feed(rank)
        self._loader: ODBDataLoader[Any] | None = None
        self._epoch = 0
        self._before = count_descriptors()

    def live(self, case: Case) -> Found:
        """Trains, or causes its fault."""
        found = Found()
        is_mine = self.rank == case.culprit
        if case.fault in WAITED_FOR:
            # A short timeout is meant for the fault, not for a rank that a busy machine has delayed in the previous case.
            dist.barrier()
        if is_mine and case.fault is Fault.NEVER:
            return found
        if is_mine and case.fault in (Fault.LATE, Fault.TOO_LATE):
            time.sleep(0.7 if case.fault is Fault.LATE else 2 * SHORT_TIMEOUT_S)
        began = time.monotonic()
        try:
            if case.is_closing:
                with self._get_loader(case) as loader:
                    self._train(loader, case, found)
            else:
                self._train(self._get_loader(case), case, found)
        except BaseException as error:
            found.error, found.blamed = type(error).__name__, getattr(error, "rank", None)
            found.text = "" if isinstance(error, Unspeakable) else str(error)[:300]
            del error
        found.seconds = time.monotonic() - began
        if case.is_closing:
            loader = self._loader = None
            found.left = find_left(case, self._before)
        return found

    def _get_loader(self, case: Case) -> ODBDataLoader[Any]:
        before, self._feed.case = self._feed.case, case
        if case.is_new or self._loader is None:
            if self._loader is not None:
                self._loader.close()
            self._epoch, self._loader = 0, self._make_loader(case)
            return self._loader
        self._epoch += 1
        if before is not None and before.fault is Fault.SAMPLER:
            self._loader.set_epoch(self._epoch)  # the previous epoch has not begun on every rank
        return self._loader

    def _make_loader(self, case: Case) -> ODBDataLoader[Any]:
        settings = case.settings
        options: dict[str, Any] = {}
        if settings.workers:
            options = {"multiprocessing_context": settings.method, "persistent_workers": settings.is_persistent}
        return ODBDataLoader(
            Samples(),
            token_budget=60 + (self.rank == case.culprit and case.fault is Fault.CONFIG),
            **nested(
                window=settings.window,
                depth=settings.depth,
                transport=settings.transport,
                accumulation_steps=settings.accumulation_steps,
                num_workers=settings.workers,
                timeout_s=case.timeout_s,
                loader_timeout_s=case.timeout_s,
                sampler=self._feed,
                shard="given",
                idle_sample=make_sample(1) | {"what": "", "error": ""},
                collate_fn=combine,
                **options,
            ),
        )

    def _train(self, loader: ODBDataLoader[Any], case: Case, found: Found) -> None:
        is_mine = self.rank == case.culprit
        for batch, info in loader.steps():
            found.numbers += [] if info.is_idle else batch["numbers"]
            found.steps += 1
            if info.step == case.step and (is_mine or case.fault is Fault.LEAVE_ALL) and not self._strike(case):
                break
            if case.is_coupled:
                dist.all_reduce(torch.zeros(1))
            elif case.fault is Fault.SLOW and is_mine:
                time.sleep(0.02)

    def _strike(self, case: Case) -> bool:
        """Causes this rank's fault at the step. Returns False if the rank leaves the loop."""
        match case.fault:
            case Fault.KILL | Fault.STOP | Fault.PAUSE:
                pid = find_victim(case.victim)
                if case.fault is Fault.PAUSE:
                    do_later(PAUSE_S, f"kill -CONT {pid} 2>&-")
                with contextlib.suppress(ProcessLookupError):  # a worker may have just ended
                    os.kill(pid, signal.SIGKILL if case.fault is Fault.KILL else signal.SIGSTOP)
                if case.fault is Fault.KILL:
                    wait_for_death(pid)
            case Fault.CUT | Fault.BLIP:
                if case.fault is Fault.BLIP:
                    do_later(BLIP_S, self._heal)
                subprocess.run(self._cut, shell=True, check=True)
            case Fault.LEAVE | Fault.LEAVE_ALL:
                return False
            case Fault.TRAINER:
                go_wrong(case.error)
            case Fault.INTERRUPT:
                os.kill(os.getpid(), signal.SIGINT)
        return True


def do_later(delay_s: float, command: str) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {delay_s}; {command}"])


def wait_for_death(pid: int) -> None:
    """Waits until a killed process is dead. It dies only when it next gets a processor, which on a busy machine may be in the
    next epoch, as its persistent worker.
    """
    is_in_time(lambda: (look := read_status(pid)) is None or look.is_ended)


def find_victim(victim: Victim) -> int:
    """Returns the victim's process, or one above it if it no longer exists."""
    if victim is Victim.RANK:
        return os.getpid()
    loader = next((child for child in multiprocessing.active_children() if child.name == "odb-loader"), None)
    if loader is None or loader.pid is None:
        return subprocess.Popen(["sleep", "3"]).pid  # the loader has finished, and is not missed
    workers = find_children(loader.pid) if victim is Victim.WORKER else []
    return workers[0] if workers else loader.pid


def find_left(case: Case, before: int) -> str:
    """Returns what this rank still has of its loader after closing it."""
    # What multiprocessing keeps for the other start methods does not count.
    allowance = before + (0 if case.settings.method == "fork" else 4)
    deadline = time.monotonic() + 10
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


def _describe_socket(number: int) -> str:
    """Returns the kind of a link, and its ends: an exchange's, the trainer's, or a loader process's."""
    with socket.socket(fileno=os.dup(number)) as found:
        try:
            return f" {found.family.name} {found.getsockname()} {found.getpeername()}"
        except OSError:  # it listens, or has ended
            return f" {found.family.name} {found.getsockname()}"


def _describe_descriptors() -> str:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            links.append(link + _describe_socket(int(name)) if link.startswith("socket:") else link)
    children = multiprocessing.process._children  # type: ignore[attr-defined]
    return f": {sorted(links)}, children {children}"
