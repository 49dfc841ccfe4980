"""Makes batches: here, or where one process would not keep up, in several, each of which has one in hand and the next at hand.

A DataLoader's workers collate too, each its own batches. Here a batch is made of samples that several workers have read, so it
is sent, as the bytes it came in, to a process that only collates. It is not a worker: ``worker_init_fn`` is not called there,
and ``get_worker_info()`` is None, as where the machine is. A quick ``collate_fn`` is not worth the way, so the first batches
are timed. What a ``collate_fn`` opens when it is first called must not be forked into several processes; so where processes
are forked, they are made while this one has not called it, and a process of its own makes the first batches too.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeAlias

import torch

from odb_ref.core.errors import OdbError
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.serialization import Packed, pack

SLOW_S: Final = 0.004
"""A ``collate_fn`` that takes longer than this on average is worth processes of its own."""

TRIAL_BATCHES: Final = 4
"""The average of so many decides, or of fewer when they have taken as long as so many may. The first does not count: what is
loaded once is loaded then.
"""

AHEAD: Final = 2
"""How many batches a process is given at most: the one that it makes, and the next, for which it is not to wait until one
thread has seen what all the others have made.
"""

POLL_S: Final = 1.0
"""How often it is looked whether processes that do not answer are still there."""

NAME: Final = "odb-collate"
"""What the names of these processes begin with."""

_SCHEDULED: Final = Path("/proc/thread-self/schedstat")
"""What Linux tells of a thread: nanoseconds that it has run, and that it has waited to."""

Pipe: TypeAlias = "Connection[object, object]"
"""One end of a pipe between two processes."""


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
    """A batch, what to warn of, and how long it took to make."""

    batch: object
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


class CollateWorkerError(OdbError, RuntimeError):
    """A ``collate_fn`` has failed in another process; the text is its traceback."""


@dataclass(frozen=True, slots=True)
class _Failure:
    cause: str
    traceback: str


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: BaseProcess
    link: Pipe
    steps: deque[int] = field(default_factory=deque)
    """What it makes, and after that what it is to make."""


class CollateWorkers:
    """Makes batches, here or in other processes: up to ``count`` others. For one thread."""

    def __init__(
        self,
        make: Callable[[CollateTask], Made],
        count: int,
        *,
        context: object = None,
        init_fn: Callable[[], None] | None = None,
    ) -> None:
        self._make = make
        self._count = count
        self._context = (
            context
            if isinstance(context, BaseContext)
            else multiprocessing.get_context(context if isinstance(context, str) else None)
        )
        self._init_fn = init_fn
        self.processes: tuple[BaseProcess, ...] = ()
        """All that were started and not ended by `close`."""
        self._workers: list[_Worker] = []
        self._made_here: deque[tuple[int, Made]] = deque()
        self._warnings: tuple[str, ...] = ()
        self._trials_s: list[float] = []
        self._are_worth_it: bool | None = None if count > 1 else False
        """None while that is not known."""

    @property
    def pending(self) -> int:
        """How many batches have begun and are not collected."""
        return sum(len(worker.steps) for worker in self._workers) + len(self._made_here)

    @property
    def oldest(self) -> int | None:
        """The first of the steps whose batches are being made elsewhere."""
        return min((worker.steps[0] for worker in self._workers if worker.steps), default=None)

    def has_room(self, left: int) -> bool:
        """Returns True when another batch can be begun before one is collected, of so many as are ``left`` to begin.

        The last are not given out ahead: whichever process is done first makes them.
        """
        if self._made_here or not self._are_worth_it:
            return not self.pending
        most = AHEAD if left > self._count else 1
        return len(self._workers) < self._count or any(len(worker.steps) < most for worker in self._workers)

    @property
    def has_lost_one(self) -> bool:
        """True when one of the processes has ended by itself."""
        return any(worker.process.exitcode is not None for worker in self._workers)

    @property
    def is_forking(self) -> bool:
        """True when processes begin with what this one has."""
        return self._context.get_start_method() == "fork"

    def prepare(self) -> None:
        """Starts a process for the first batches, where it must be started before ``collate_fn`` is called here.

        Raises: what starting one raises.
        """
        if self._are_worth_it is None and self.is_forking and not self._workers:
            self._start()

    def begin(self, number: int, task: CollateTask) -> None:
        """Makes the batch of a step, or has it made.

        Raises: what ``collate_fn`` raises here, and what sending samples raises.
        """
        worker = self._find_worker() if task.can_travel else None
        if worker is None:
            made = _make_timed(self._make, task) if self._are_worth_it is None else self._make(task)
            self._made_here.append((number, made))
            return
        data = ForkingPickler.dumps(task)
        # It may still have a batch to send, so large that it waits to be received. It takes in what is sent here all the same
        # (`_listen`): neither waits for the other.
        try:
            worker.link.send_bytes(data)
        except OSError:  # `collect` tells of it, when it has received what was sent before
            worker.process.kill()
        worker.steps.append(number)

    def collect(self) -> tuple[int, Made]:
        """Returns the next batch that is ready, packed if it was made elsewhere, and the number of its step. Waits for it.

        Raises: CollateWorkerError when ``collate_fn`` has raised in another process, or that is gone.
        """
        if len(self._trials_s) == 1 and self._are_worth_it is None:
            self._start_meanwhile()
        number, made = self._made_here.popleft() if self._made_here else self._receive()
        if self._are_worth_it is None:
            self._judge(made.seconds)
        warnings, self._warnings = self._warnings, ()
        return number, replace(made, warnings=made.warnings + warnings) if warnings else made

    def _receive(self) -> tuple[int, Made]:
        busy = [worker for worker in self._workers if worker.steps]
        while not (ready := wait([worker.link for worker in busy], POLL_S)):
            # One that is gone ends its link, unless it has left a child, which has a copy of that.
            for worker in busy:
                if worker.process.exitcode is not None and not worker.link.poll():
                    raise self._lose(worker)
        worker = next(worker for worker in busy if worker.link in ready)
        try:
            answer = worker.link.recv()
        except (EOFError, OSError):
            raise self._lose(worker) from None
        number = worker.steps.popleft()
        match answer:
            case Made():
                return number, answer
            case _Failure(cause, text):
                raise CollateWorkerError(f"{cause}, where step {number} is collated.\nOriginal Traceback: {text}")
            case _:
                raise CollateWorkerError(f"unexpected answer: {answer!r}")

    def _judge(self, seconds: float) -> None:
        self._trials_s.append(seconds)
        counted = self._trials_s[1:]
        if sum(counted) > SLOW_S * TRIAL_BATCHES:
            self._are_worth_it = True
        elif len(counted) == TRIAL_BATCHES:
            self._are_worth_it = False
            self.close()

    def _find_worker(self) -> _Worker | None:
        """Returns the process that has the least to do, started now if need be; None when this one is to make the batch."""
        while self._are_worth_it and len(self._workers) < self._count:
            if self.is_forking and not all(worker.steps for worker in self._workers):
                break
            self._try_start()  # where it takes seconds, all at once: sending to one may wait until it is there
        return min(self._workers, key=lambda worker: len(worker.steps), default=None)

    def _start_meanwhile(self) -> None:
        """Starts processes for as long as one makes the second batch, once that has taken what proves ``collate_fn`` slow."""
        links = [worker.link for worker in self._workers if worker.steps]
        wait_s = SLOW_S * TRIAL_BATCHES
        while links and len(self._workers) < self._count and not wait(links, wait_s):
            self._try_start()
            wait_s = 0.0

    def _try_start(self) -> None:
        try:
            self._start()
        except Exception as error:  # a collate_fn that cannot be sent, now that it was called; a limit of the system
            self._count = len(self._workers)
            self._are_worth_it = self._are_worth_it if self._count else False
            self._warnings = (
                f"collate_fn is slow, and cannot run in all the processes of the workers: {describe(error)}",
            )

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        with theirs:
            process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(self._make, self._init_fn, theirs), name=NAME, daemon=True
            )
            process.start()
        self.processes += (process,)
        self._workers.append(_Worker(process, ours))

    def _lose(self, worker: _Worker) -> CollateWorkerError:
        """Returns what to raise when a process is gone. What else it was to make is lost too."""
        self._workers = [other for other in self._workers if other is not worker]
        worker.link.close()
        worker.process.join(1.0)
        return CollateWorkerError(
            f"the process that collates (pid {worker.process.pid}) exited unexpectedly "
            f"(exit code {worker.process.exitcode}) at step {worker.steps[0]}"
        )

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        workers, self._workers = self._workers, []
        processes, self.processes = self.processes, ()
        self._made_here.clear()
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for worker in workers:
            worker.link.close()


def _make_timed(make: Callable[[CollateTask], Made], task: CollateTask) -> Made:
    """Returns the batch, and the time it took; without what this thread has waited for a processor, where that can be told."""
    began_s, waited_s = time.monotonic(), _read_waited_s()
    made = make(task)
    return replace(made, seconds=time.monotonic() - began_s - (_read_waited_s() - waited_s))


def _read_waited_s() -> float:
    """Returns for how long this thread, ready to run, has waited for a processor; always 0 where that cannot be told."""
    try:
        return int(_SCHEDULED.read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _serve(make: Callable[[CollateTask], Made], init_fn: Callable[[], None] | None, link: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    torch.set_num_threads(1)
    if init_fn is not None:
        init_fn()
    tasks: SimpleQueue[object] = SimpleQueue()
    threading.Thread(target=_listen, args=(link, tasks), name="odb-listen", daemon=True).start()
    while (task := tasks.get()) is not None:
        link.send(_answer(make, task))


def _listen(link: Pipe, tasks: SimpleQueue[object]) -> None:
    """Takes in what comes, until the loader process is gone: then puts None. No more comes than `AHEAD` allows.

    It waits for nothing else: so the sender never waits for a batch to be made, nor for one to be received. And the files in
    which large samples come are closed at once.
    """
    try:
        while True:
            data = link.recv_bytes()
            try:
                tasks.put(pickle.loads(data))
            except BaseException as error:  # samples that cannot be rebuilt here: told in the place of their batch
                tasks.put(error)
    except (EOFError, OSError):
        pass
    finally:
        tasks.put(None)


def _answer(make: Callable[[CollateTask], Made], task: object) -> Made | _Failure:
    try:
        if isinstance(task, BaseException):
            raise task
        if not isinstance(task, CollateTask):
            raise OdbError(f"unexpected message to a process that collates: {task!r}")
        made = _make_timed(make, task)
        return replace(made, batch=pack(made.batch))
    except BaseException as error:  # whatever collate_fn raises: also what would end the process without a word
        return _Failure(describe(error), "".join(traceback.format_exception(error)))
