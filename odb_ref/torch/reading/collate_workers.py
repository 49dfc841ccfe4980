"""Processes that make batches where one process would not keep up: each has the ``collate_fn`` and makes one at a time.

A DataLoader's workers collate too, each its own batches. Here a batch is made of samples that several workers have read, so it
is sent, as the bytes it came in, to a process that only collates. A quick ``collate_fn`` is not worth the way: these processes
start once it has proved to be slow.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final, TypeAlias

import torch

from odb_ref.core.errors import OdbError
from odb_ref.torch.reading.serialization import Packed, pack

SLOW_S: Final = 0.004
"""A ``collate_fn`` that takes longer than this on average is worth a process of its own."""

TRIAL_BATCHES: Final = 4
"""The average is taken over at least so many batches."""

NAME: Final = "odb-collate"
"""What the names of these processes begin with."""

Link: TypeAlias = "Connection[object, object]"


@dataclass(frozen=True, slots=True)
class CollateTask:
    """What a batch is made of, and the seed of what is drawn meanwhile."""

    seed: int
    samples: tuple[object, ...]
    supervised: int | None
    """Supervised tokens that were counted; None where nothing depends on them (idle batches)."""

    @property
    def can_travel(self) -> bool:
        """True when another process can be sent the samples as they are."""
        return all(isinstance(sample, Packed) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Made:
    """A batch, and what is doubtful about it."""

    batch: object
    doubts: tuple[str, ...] = ()


class CollateWorkerError(OdbError, RuntimeError):
    """A ``collate_fn`` has failed in another process; the text is its traceback."""


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    link: Link


class CollateWorkers:
    """So many processes, started when they are first needed; for one thread."""

    def __init__(
        self,
        make: Callable[[CollateTask], Made],
        count: int,
        *,
        context: object = None,
        init_fn: object = None,
    ) -> None:
        self._make = make
        self._count = count
        self._context = multiprocessing.get_context(context if isinstance(context, str) else None)
        self._init_fn = init_fn
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._busy: dict[int, tuple[_Worker, int]] = {}
        """By the file descriptor of its link: who makes which step."""
        self._made = 0
        self._spent_s = 0.0

    @property
    def are_worth_it(self) -> bool:
        """True once the batches made by `make` have shown that they take long."""
        return self._count > 1 and self._made >= TRIAL_BATCHES and self._spent_s > SLOW_S * self._made

    @property
    def pending(self) -> int:
        """How many batches are being made."""
        return len(self._busy)

    @property
    def has_room(self) -> bool:
        """True when another batch can be begun at once."""
        return len(self._busy) < max(1, self._count)

    @property
    def has_lost_one(self) -> bool:
        """True when one of the processes has ended by itself."""
        return any(worker.process.exitcode is not None for worker in self._workers)

    def make(self, task: CollateTask) -> Made:
        """Makes a batch here, and remembers how long it took."""
        began = time.monotonic()
        made = self._make(task)
        self._spent_s += time.monotonic() - began
        self._made += 1
        return made

    def submit(self, number: int, task: CollateTask) -> None:
        """Has the batch of a step made by a process that is idle.

        Raises: CollateWorkerError when that process is gone, and what starting one raises.
        """
        if not self._workers:
            self._start()
        worker = self._idle.pop()
        try:
            worker.link.send(task)
        except OSError:
            raise _describe_loss(worker.process) from None
        self._busy[worker.link.fileno()] = (worker, number)

    def collect(self) -> tuple[int, Made]:
        """Returns the next batch that is ready, packed, and the number of its step. Waits for it.

        Raises: CollateWorkerError when ``collate_fn`` has raised, or its process is gone.
        """
        links = {worker.link: worker for worker, _ in self._busy.values()}
        sentinels = {worker.process.sentinel: worker for worker in links.values()}
        ready = wait([*links, *sentinels])
        link = next((item for item in ready if isinstance(item, Connection)), None)
        if link is None:
            raise _describe_loss(next(sentinels[item] for item in ready if isinstance(item, int)).process)
        worker, number = self._busy.pop(link.fileno())
        try:
            answer = link.recv()
        except (EOFError, OSError):
            raise _describe_loss(worker.process) from None
        if not isinstance(answer, Made):
            raise CollateWorkerError(answer.text if isinstance(answer, _Failure) else f"unexpected answer: {answer!r}")
        self._idle.append(worker)
        return number, answer

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        workers, self._workers, self._idle = self._workers, [], []
        self._busy.clear()
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.link.close()

    def _start(self) -> None:
        for index in range(self._count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(index, self._make, self._init_fn, theirs), name=f"{NAME}-{index}", daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        self._idle = list(self._workers)


def _describe_loss(process: BaseProcess) -> CollateWorkerError:
    process.join(1.0)
    return CollateWorkerError(
        f"the process that collates (pid {process.pid}) exited unexpectedly (exit code {process.exitcode})"
    )


def _serve(index: int, make: Callable[[CollateTask], Made], init_fn: object, link: Link) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    torch.set_num_threads(1)
    if callable(init_fn):
        init_fn(index)
    while True:
        try:
            task = link.recv()
        except (EOFError, OSError):  # the loader process is gone
            return
        link.send(_answer(make, task))


def _answer(make: Callable[[CollateTask], Made], task: object) -> Made | _Failure:
    try:
        if not isinstance(task, CollateTask):
            raise OdbError(f"unexpected message to a process that collates: {task!r}")
        made = make(task)
        return Made(pack(made.batch), made.doubts)
    except BaseException as error:  # whatever collate_fn raises: also what would end the process without a word
        text = "".join(traceback.format_exception(error))
        return _Failure(f"Caught {type(error).__name__} in a process that collates.\nOriginal Traceback: {text}")
