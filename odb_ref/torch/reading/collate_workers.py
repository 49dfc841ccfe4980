"""Makes batches in processes of their own, each of which has one in hand and the next at hand.

A DataLoader's workers collate too, each its own batches. Here a batch is made of samples that several workers have read, so it
is sent, as the bytes it came in, to a process that only collates. It is not a worker: ``worker_init_fn`` is not called there,
and ``get_worker_info()`` is None, as where the machine is. What a ``collate_fn`` opens when it is first called must not be
forked into several processes, so the process that starts them never calls it. There is one of them, and more where it does not
keep up.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Final, TypeAlias

import torch

from odb_ref.core.errors import OdbError
from odb_ref.torch.reading.collator import CollateTask, Made
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.serialization import pack

SLOW_S: Final = 0.004
SLOW_TIMES: Final = 3
FORGIVEN: Final = 0.25
"""Where no batch is made for so long, and another waits to be begun, so many times, one more process is worth it. A batch
that is made sooner takes so much off, not all: of processes that began together all end together, and one wait is long.
"""

AHEAD: Final = 2
"""How many batches a process is given at most: the one that it makes, and the next, for which it is not to wait until one
thread has seen what all the others have made.
"""

POLL_S: Final = 1.0
"""How often it is looked whether processes that do not answer are still there."""

NAME: Final = "odb-collate"
"""What the names of these processes begin with."""


class CollateWorkerError(OdbError, RuntimeError):
    """A ``collate_fn`` has failed; the text is its traceback."""


@dataclass(frozen=True, slots=True)
class _Failure:
    cause: str
    traceback: str


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: BaseProcess
    link: Connection[bytes, Made | _Failure]
    steps: deque[int] = field(default_factory=deque)
    """What it makes, and after that what it is to make."""


class CollateWorkers:
    """Makes batches in up to ``count`` processes. For one thread."""

    def __init__(
        self,
        make: Callable[[CollateTask], Made],
        count: int,
        *,
        context: BaseContext | str | None = None,
        init_fn: Callable[[], None] | None = None,
    ) -> None:
        self._make = make
        self._count = count
        self._context = context if isinstance(context, BaseContext) else multiprocessing.get_context(context)
        self._init_fn = init_fn
        self.processes: tuple[BaseProcess, ...] = ()
        """All that were started and not ended by `close`."""
        self._workers: list[_Worker] = []
        self._is_warm = False
        """True once a batch was made: what takes long before is to load what it takes."""
        self._slow_times = 0.0

    @property
    def pending(self) -> int:
        """How many batches have begun and are not collected."""
        return sum(len(worker.steps) for worker in self._workers)

    @property
    def oldest(self) -> int | None:
        """The first of the steps whose batches are being made."""
        return min((worker.steps[0] for worker in self._workers if worker.steps), default=None)

    @property
    def has_lost_one(self) -> bool:
        """True when one of the processes has ended by itself."""
        return any(worker.process.exitcode is not None for worker in self._workers)

    @property
    def is_forking(self) -> bool:
        """True when processes begin with what this one has."""
        return self._context.get_start_method() == "fork"

    def prepare(self) -> None:
        """Starts the first process, unless there is one.

        Raises: what starting one raises.
        """
        if not self._workers:
            self._start()

    def make_room(self, left: int) -> bool:
        """Returns True when another batch can be begun before one is collected, of so many as are ``left`` to begin. Where the
        processes there are do not keep up, waits a moment, and starts another.

        The last are not given out ahead: whichever process is done first makes them.
        """
        most = AHEAD if left > self._count else 1
        if not self._workers or any(len(worker.steps) < most for worker in self._workers):
            return True
        if not self._is_warm or len(self._workers) >= self._count:
            return False
        is_slow = not wait([worker.link for worker in self._workers], SLOW_S)
        self._slow_times = self._slow_times + 1 if is_slow else max(0.0, self._slow_times - FORGIVEN)
        return self._slow_times >= SLOW_TIMES and self._grow()

    def _grow(self) -> bool:
        """Starts another process, and returns whether there is one; where that takes seconds all at once, for sending to one
        may wait until it is there.
        """
        self._slow_times = 0.0
        try:
            for _ in range(1 if self.is_forking else self._count - len(self._workers)):
                self._start()
        except OSError:  # a limit of the system: those there are go on
            self._count = len(self._workers)
            return False
        return True

    def begin(self, number: int, task: CollateTask) -> None:
        """Sends a process what the batch of a step is made of.

        Raises: what sending samples raises.
        """
        self.prepare()
        worker = min(self._workers, key=lambda worker: len(worker.steps))
        data = ForkingPickler.dumps(replace(task, samples=tuple(map(pack, task.samples))))
        # It may still have a batch to send, so large that it waits to be received. It takes in what is sent here all the same
        # (`_listen`): neither waits for the other.
        try:
            worker.link.send_bytes(data)
        except OSError:  # `collect` tells of it, when it has received what was sent before
            worker.process.kill()
        worker.steps.append(number)

    def collect(self) -> tuple[int, Made]:
        """Returns the next batch that is ready, packed, and the number of its step. Waits for it.

        Raises: CollateWorkerError when ``collate_fn`` has raised, or a process is gone.
        """
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
        self._is_warm = True
        number = worker.steps.popleft()
        match answer:
            case Made():
                return number, answer
            case _Failure(cause, text):
                raise CollateWorkerError(f"{cause}, where step {number} is collated.\nOriginal Traceback: {text}")

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
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for worker in workers:
            worker.link.close()


Link: TypeAlias = "Connection[Made | _Failure, bytes]"


def _serve(make: Callable[[CollateTask], Made], init_fn: Callable[[], None] | None, link: Link) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    torch.set_num_threads(1)
    if init_fn is not None:
        init_fn()
    tasks: SimpleQueue[CollateTask | BaseException | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(link, tasks), name="odb-listen", daemon=True).start()
    while (task := tasks.get()) is not None:
        link.send(_answer(make, task))


def _listen(link: Link, tasks: SimpleQueue[CollateTask | BaseException | None]) -> None:
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


def _answer(make: Callable[[CollateTask], Made], task: CollateTask | BaseException) -> Made | _Failure:
    try:
        if isinstance(task, BaseException):
            raise task
        made = make(task)
        return replace(made, batch=pack(made.batch))
    except BaseException as error:  # whatever collate_fn raises: also what would end the process without a word
        return _Failure(describe(error), "".join(traceback.format_exception(error)))
