"""Makes batches in separate processes. Each has up to two batches: one being made, and the next.

A DataLoader's workers collate their own samples. Here a batch mixes samples from several workers, so their bytes are sent on to
a process that only collates. This process is not a worker: it does not call ``worker_init_fn``, and ``get_worker_info()`` is
None, as in the process that runs the machine. The process that starts collating processes never calls ``collate_fn``: what a
``collate_fn`` opens on its first call must not be forked into several processes. There is one collating process at first, and
more if it does not keep up.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
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
from odb_ref.torch.reading.description import Failure, RebuildReporter, describe_exit
from odb_ref.torch.reading.serialization import pack

SLOW_S: Final = 0.004
SLOW_TIMES: Final = 3
FORGIVEN: Final = 0.25
"""One more process is worth starting after `SLOW_TIMES` waits of `SLOW_S` during which no batch was finished while another was
ready to begin. A batch that is finished sooner only reduces this count by `FORGIVEN`: processes that began together also end
together, so one long wait is followed by several short ones.
"""

AHEAD: Final = 2
"""How many batches a process holds at most: the one being made, and the next. With the next one at hand, the process need not
wait until the only collecting thread has handled the batches of all others.
"""

POLL_S: Final = 1.0
"""How often to check whether processes that do not answer still exist."""

NAME: Final = "odb-collate"
"""The prefix of these processes' names."""


class CollateWorkerError(OdbError, RuntimeError):
    """A ``collate_fn`` has failed, or its process is gone. After a failure the text includes the traceback."""


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: BaseProcess
    link: Connection[bytes, Made | Failure]
    steps: deque[int] = field(default_factory=deque)
    """The steps whose batches it makes, the current one first."""


class CollateWorkers:
    """Makes batches in up to ``count`` processes. Only one thread may use it."""

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
        """All processes started and not yet ended by `close`."""
        self._workers: list[_Worker] = []
        self._is_warm = False
        """True once a batch was made. Before that, a long wait only means that the process is still loading its code."""
        self._slow_times = 0.0

    @property
    def pending(self) -> int:
        """The number of batches begun but not collected."""
        return sum(len(worker.steps) for worker in self._workers)

    @property
    def oldest(self) -> int | None:
        """The earliest step whose batch is being made."""
        return min((worker.steps[0] for worker in self._workers if worker.steps), default=None)

    @property
    def has_lost_one(self) -> bool:
        """True if a process has ended by itself."""
        return any(worker.process.exitcode is not None for worker in self._workers)

    @property
    def is_forking(self) -> bool:
        """True if processes inherit this one's memory."""
        return self._context.get_start_method() == "fork"

    def prepare(self) -> None:
        """Starts the first process, unless there is one. Raises: errors from starting a process."""
        if not self._workers:
            self._start()

    def make_room(self, left: int) -> bool:
        """Returns True if another of the ``left`` batches can begin before one is collected. If the present processes do not
        keep up, waits briefly and starts another.

        The last batches are not handed out ahead of time, so that the first free process makes them.
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
        """Starts another process, or all remaining ones if starting takes seconds, because sending to one may block until it
        runs. Returns whether there is a new one.
        """
        self._slow_times = 0.0
        try:
            for _ in range(1 if self.is_forking else self._count - len(self._workers)):
                self._start()
        except OSError:  # a limit of the system: continue with the processes that exist
            self._count = len(self._workers)
            return False
        return True

    def begin(self, number: int, task: CollateTask) -> None:
        """Sends the samples of a step's batch to a process. Raises: errors from sending samples."""
        self.prepare()
        worker = min(self._workers, key=lambda worker: len(worker.steps))
        data = ForkingPickler.dumps(replace(task, samples=tuple(map(pack, task.samples))))
        # The process may be blocked sending a large batch that was not received yet. Its `_listen` thread still receives what
        # is sent here, so the two never wait for each other.
        try:
            worker.link.send_bytes(data)
        except OSError:  # `collect` reports it, after receiving what was sent earlier
            worker.process.kill()
        worker.steps.append(number)

    def collect(self) -> tuple[int, Made]:
        """Waits for the next batch. Returns its step's number and the packed batch.

        Raises: CollateWorkerError when ``collate_fn`` has raised or a process is gone.
        """
        busy = [worker for worker in self._workers if worker.steps]
        while not (ready := wait([worker.link for worker in busy], POLL_S)):
            # The link of a dead process ends, unless the process has left a child with a copy of it.
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
            case Failure(cause, text):
                raise CollateWorkerError(f"{cause}, while collating step {number}.\nOriginal Traceback: {text}")

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        with theirs:
            process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
                target=_serve,
                args=(RebuildReporter(theirs), self._make, self._init_fn, theirs),
                name=NAME,
                daemon=True,
            )
            process.start()
        self.processes += (process,)
        self._workers.append(_Worker(process, ours))

    def _lose(self, worker: _Worker) -> CollateWorkerError:
        """Removes a dead process, with all its batches, and returns the error to raise."""
        self._workers = [other for other in self._workers if other is not worker]
        worker.link.close()
        worker.process.join(1.0)
        return CollateWorkerError(
            f"the process that collates (pid {worker.process.pid}) {describe_exit(worker.process.exitcode)} at step "
            f"{worker.steps[0]}"
        )

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        workers, self._workers = self._workers, []
        processes, self.processes = self.processes, ()
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for worker in workers:
            worker.link.close()


Link: TypeAlias = "Connection[Made | Failure, bytes]"


def _serve(
    _: RebuildReporter[Link],
    make: Callable[[CollateTask], Made],
    init_fn: Callable[[], None] | None,
    link: Link,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    torch.set_num_threads(1)
    if init_fn is not None:
        init_fn()
    tasks: SimpleQueue[CollateTask | BaseException | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(link, tasks), name="odb-listen", daemon=True).start()
    while (task := tasks.get()) is not None:
        link.send(_answer(make, task))


def _listen(link: Link, tasks: SimpleQueue[CollateTask | BaseException | None]) -> None:
    """Receives tasks until the loader process is gone, and then puts None. `AHEAD` limits their number.

    This thread does nothing else, so the sender never waits for a batch to be made or received. It also closes the files of
    large samples early.
    """
    try:
        while True:
            data = link.recv_bytes()
            try:
                tasks.put(pickle.loads(data))
            except BaseException as error:  # the samples cannot be rebuilt here: reported in place of their batch
                tasks.put(error)
    except (EOFError, OSError):
        pass
    finally:
        tasks.put(None)


def _answer(make: Callable[[CollateTask], Made], task: CollateTask | BaseException) -> Made | Failure:
    try:
        if isinstance(task, BaseException):
            raise task
        made = make(task)
        return replace(made, batch=pack(made.batch, what="a batch"))
    except BaseException as error:  # whatever collate_fn raises, including what would silently end the process
        return Failure.of(error)
