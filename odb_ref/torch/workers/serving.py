"""The loader process: a `ReadPipeline` controlled over a pipe, above the workers of the inner DataLoader.

It ends on request, or when the process that started it ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from typing import Concatenate, Final, ParamSpec, TypeAlias

import torch

from odb_ref.core.errors import OdbError
from odb_ref.torch.exchange.process_table import read_status
from odb_ref.torch.reading import collate_workers
from odb_ref.torch.reading.description import Failure, RebuildReporter, describe, describe_exit
from odb_ref.torch.reading.pipeline import PipelineSpec, ReadPipeline
from odb_ref.torch.reading.serialization import pack
from odb_ref.torch.reading.service import ReadItem, ReadPlan, SampleListener
from odb_ref.torch.workers.watching import Stops

P = ParamSpec("P")

WATCH_S: Final = 0.5
"""How often a loader process checks the training process and its own workers, and reports that it is alive."""

ORPHAN_CODE: Final = 83
"""The exit code of a process that ends because the one that started it is gone. Nothing else in Python or here uses it."""


_FATAL: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals after which no process can continue."""


class LoaderProcessError(OdbError, RuntimeError):
    """Something failed in the loader process. The text is its traceback."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An event in an epoch: a call to a method of its `SampleListener`, or that reading or collating has failed."""

    epoch: int
    event: methodcaller | Failure


Message: TypeAlias = Notice | Failure | str
Pipe: TypeAlias = "Connection[Message, methodcaller | None]"
"""The loader process sends events, a failure to start and, as text, what it is doing. It gets calls of `LoaderServer` methods,
and None to end.
"""


class _Sender:
    """Sends messages in order from its own thread, so that no other thread waits for the pipe.

    The training process may not read a message of this process before its own message has been read.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="odb-send", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._pipe.send(message)
            except BaseException as error:  # no shared memory left for the batch, or a batch that cannot be pickled
                if isinstance(message, Notice):
                    self._send_failure(replace(message, event=Failure.of(error)))

    def _send_failure(self, failure: Notice) -> None:
        try:
            self._pipe.send(failure)
        except OSError:  # the training process is gone
            os._exit(1)


class _Reporter:
    """Forwards calls of `SampleListener` methods in one epoch to the training process."""

    def __init__(self, sender: _Sender, epoch: int) -> None:
        self._sender = sender
        self._epoch = epoch

    def _send(self, method: Callable[Concatenate[SampleListener, P], None], *args: P.args, **options: P.kwargs) -> None:
        self._sender.send(Notice(self._epoch, methodcaller(method.__name__, *args, **options)))

    def on_read(self, items: Sequence[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        self._send(SampleListener.on_read, items, is_ended=is_ended, is_full=is_full)

    def on_batch(self, number: int, batch: object) -> None:
        self._send(SampleListener.on_batch, number, pack(batch, what="a batch"))

    def on_warning(self, text: str) -> None:
        self._send(SampleListener.on_warning, text)

    def on_bad(self, place: int, cause: str) -> None:
        self._send(SampleListener.on_bad, place, cause)

    def on_error(self, cause: str, error: BaseException) -> None:
        self._sender.send(Notice(self._epoch, Failure.of(error, cause)))


def _is_orphaned(forked_from: int | None) -> bool:
    """Returns True if the process that started this one is gone. A fork server in between does not count.

    Multiprocessing detects this by a pipe, whose end may be closed by mistake, or together with the object that represents this
    process. So if the pipe reports the process as gone, the operating system must agree.
    """
    if forked_from is not None:
        return os.getppid() != forked_from
    parent = multiprocessing.parent_process()
    return parent is None or parent.pid is None or (not parent.is_alive() and not _is_there(parent.pid))


def _is_there(pid: int) -> bool:
    status = read_status(pid)
    return status is not None and not status.is_ended


def _watch(forked_from: int | None, look: Callable[[], object]) -> None:
    """Ends this process when the one that started it is gone. Calls ``look`` regularly."""
    while not _is_orphaned(forked_from):
        look()
        time.sleep(WATCH_S)
    os._exit(ORPHAN_CODE)


def _start_watch(forked_from: int | None, look: Callable[[], object] = lambda: None) -> None:
    threading.Thread(target=_watch, args=(forked_from, look), name="odb-watch", daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTask:
    """The arguments of a loader process. They include its first epoch, so that its start never waits for a message."""

    spec: PipelineSpec
    pipe: Pipe
    other_end: Connection[methodcaller | None, Message] | None
    """A forked copy of the other end, which would hide the end of the training process."""
    forked_from: int | None
    epoch: int
    plan: ReadPlan
    read_ahead: int
    handled_signals: tuple[int, ...]
    """The signals that the user handles in the training process."""

    def __reduce__(self) -> tuple[object, ...]:
        # As bytes, because `Process.start` would wait for ever for a process that ends before it has received everything.
        rest = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "pipe"}
        return _rebuild_task, (RebuildReporter(self.pipe), bytes(ForkingPickler.dumps(rest)))


def _rebuild_task(reporter: RebuildReporter[Pipe], rest: bytes) -> LoaderTask:
    return LoaderTask(pipe=reporter.pipe, **pickle.loads(rest))


def serve(task: LoaderTask) -> None:
    """Runs the loader process: carries out requests until it is asked to end, or the training process is gone."""
    if task.other_end is not None:
        task.other_end.close()
    _shield(task.handled_signals)
    torch.set_num_threads(1)
    if task.spec.options.multiprocessing_context == "forkserver":
        # This process gets its own fork server, whose children would each import torch again without this.
        multiprocessing.set_forkserver_preload(["__main__", __name__])
    spec, sender = task.spec, _Sender(task.pipe)
    # Torch's own check does not end a worker that is blocked sending to a reader that is gone, because the pipe is full.
    watch = partial(_start_watch, None if task.forked_from is None else os.getpid())
    server = LoaderServer(replace(spec, options=replace(spec.options, process_init_fn=watch)), sender)

    def look() -> None:
        server.check_workers(WATCH_S)
        sender.send(server.describe())

    _start_watch(task.forked_from, look)
    server.begin_epoch(task.epoch, task.plan, task.read_ahead, task.handled_signals)
    with contextlib.suppress(EOFError, ConnectionResetError):  # the training process is gone
        while (call := task.pipe.recv()) is not None:
            call(server)
    # A thread may wait for a dead worker for seconds, and for a hanging one for ever: then the process ends without it.
    if server.check_workers():
        server.close()
    sender.close()
    for worker in multiprocessing.active_children():
        worker.kill()


def _shield(handled: Iterable[int]) -> None:
    """Disarms signals that the user handles. Only the training process should run the handlers, and a signal sent to all
    processes of a job must not end this one if it does not end that one.

    The signals are not ignored, because programs that a data set starts would inherit that.
    """
    for number in handled:
        signal.signal(number, signal.SIG_DFL if number in _FATAL else _do_nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise, ignored or a DataLoader's, workers' ends go unseen


def _do_nothing(number: int, frame: object) -> None:
    """Handles a signal by doing nothing."""


class LoaderServer(ReadPipeline):
    """Carries out the requests of the training process, and watches over the workers."""

    def __init__(self, spec: PipelineSpec, sender: _Sender) -> None:
        super().__init__(spec, is_inline=False)
        self._sender = sender
        self._stops = Stops(spec.options.silence_s)
        self._reporter: _Reporter | None = None
        """Receives reports of lost workers; None between epochs."""

    def begin_epoch(self, epoch: int, plan: ReadPlan, read_ahead: int, handled_signals: tuple[int, ...]) -> None:
        """Begins an epoch, with the signals that the training process handles now. The previous epoch has ended."""
        _shield(handled_signals)
        self._reporter, reporter = None, _Reporter(self._sender, epoch)
        try:
            self.begin(plan, reporter, read_ahead)
        except BaseException as error:  # a data set may raise anything, and a DataLoader may refuse its arguments
            reporter.on_error(describe(error), error)
        # Set this only now: workers that died since the last epoch were replaced and do not concern this one.
        self._reporter = reporter

    def end(self) -> None:
        """Ends the epoch; its workers stay for the next."""
        self._reporter = None
        super().end()

    def check_workers(self, seconds: float = 0.0) -> bool:
        """Checks the workers, ``seconds`` after the last time. Returns False, and fails the epoch, if one has died or was
        stopped for too long. Torch itself checks only every five seconds, and only for dead workers.
        """
        reporter = self._reporter  # read this first: a worker of an epoch that is just ending does not concern the next
        if (worker := self.find_dead_worker()) is not None:
            why = self.take_rebuild_failure()
            _tell(reporter, f"{_describe(worker)} {describe_exit(worker.exitcode)}{why and f': {why}'}")
            return False
        if (stopped := self._stops.look(self.processes, seconds)) is not None:
            worker, how = stopped
            _tell(reporter, f"{_describe(worker)} {how}")
            worker.kill()  # so that no thread waits for it, and the next epoch begins without it
            return False
        return True


def _describe(worker: BaseProcess) -> str:
    is_collating = worker.name.startswith(collate_workers.NAME)
    return f"{'the process that collates' if is_collating else 'DataLoader worker'} (pid {worker.pid})"


def _tell(reporter: _Reporter | None, cause: str) -> None:
    if reporter is not None:
        reporter.on_error(cause, RuntimeError(cause))
