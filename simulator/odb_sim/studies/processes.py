"""An executor of processes of this machine that survives their deaths: a killed process fails only the task it had.

Each worker is a process, with a thread of this process that gives it a task, waits for the answer, and replaces the process if
it has died. So it is known which task a death belongs to, and nothing waits for a process that is gone. A worker ignores
Ctrl-C, and ends with its parent process, however that ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar, cast

from odb_ref.core.errors import OdbError, UsageError

P = ParamSpec("P")
T = TypeVar("T")

_JOIN_S: Final = 2.0
if TYPE_CHECKING:
    Link = Connection[object, object]


class WorkerDied(UsageError):
    """The process that worked on a task is gone. Usually it was killed because the machine ran out of memory."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error that a task raised in its process."""

    error: Exception


class Local(Executor):
    """Runs each task at once in this process, for one worker and for tests."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns a future that is already done."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except OdbError as error:
            future.set_exception(error)
        return future


def make_executor(workers: int) -> Executor:
    """Returns an executor of ``workers`` processes of this machine, or for one worker of this process itself.

    Raises: UsageError when there is less than one worker.
    """
    if workers < 1:
        raise UsageError(f"--processes must be at least 1, got {workers}")
    return Local() if workers == 1 else Processes(workers)


class Processes(Executor):
    """See the top of this module. On leaving, it waits for tasks under way, or after an exception ends them."""

    def __init__(self, workers: int) -> None:
        self._tasks: SimpleQueue[Callable[[_ProcessSlot], None] | None] = SimpleQueue()
        self._workers = [_ProcessSlot() for _ in range(workers)]
        self._threads = [Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers]
        resource_tracker.ensure_running()  # once, and not by a thread, whose mask it would change
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns the future of a task in a process. It fails with WorkerDied if the process is killed."""
        future: Future[T] = Future()

        def run(worker: _ProcessSlot) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(worker.call(fn, *args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends all workers, after the tasks submitted or, with ``cancel_futures``, now."""
        if cancel_futures:
            for worker in self._workers:
                worker.close()
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join(_JOIN_S if cancel_futures else None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown(cancel_futures=error is not None)

    def _serve(self, worker: _ProcessSlot) -> None:
        if hasattr(signal, "pthread_sigmask"):  # inherited by the processes this thread starts
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while (run := self._tasks.get()) is not None:
            run(worker)
        worker.close()


class _ProcessSlot:
    """Holds one process at a time, started when there is a task."""

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None
        self._link: Link | None = None
        self._lock = Lock()
        self._is_closed = False

    def call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what ``fn`` returns in the process.

        Raises: the errors of ``fn``; WorkerDied when the process is gone.
        """
        process, link = self._get_process()
        try:
            link.send(partial(fn, *args, **kwargs))
            answer = link.recv()
        except (EOFError, OSError):
            process.join(_JOIN_S)
            code, self._process = process.exitcode, None
            how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            raise WorkerDied(f"the process that ran the simulation was killed ({how})") from None
        if isinstance(answer, _Raised):
            raise answer.error
        return cast("T", answer)

    def _get_process(self) -> tuple[SpawnProcess, Link]:
        with self._lock:
            if self._is_closed:
                raise WorkerDied("the executor has been shut down")
            if self._process is None or self._link is None:
                context = get_context("spawn")  # not fork, because there are threads
                self._link, theirs = context.Pipe()
                self._process = context.Process(target=_work, args=(theirs,), daemon=True)
                self._process.start()
                theirs.close()
            return self._process, self._link

    def close(self) -> None:
        """Ends the process, even in the middle of a task."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()


def _work(link: Link) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = link.recv()
        except EOFError:
            return
        try:
            answer = task() if callable(task) else None
        except Exception as error:
            answer = _Raised(error)
        link.send(answer)


def _end_with_parent() -> None:
    # A worker that is working does not notice that its parent was killed.
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
