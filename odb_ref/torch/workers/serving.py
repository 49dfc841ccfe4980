"""The loader process: a `ReadPipeline` that is told over a pipe what to do, and the workers of the inner DataLoader under it.

It ends when it is told to, or with the process that has started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import methodcaller
from typing import Concatenate, Final, ParamSpec, TypeAlias

import torch

from odb_ref.core.errors import OdbError
from odb_ref.torch.exchange.process_table import read_status
from odb_ref.torch.reading import collate_workers
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.pipeline import PipelineSpec, ReadPipeline
from odb_ref.torch.reading.serialization import pack
from odb_ref.torch.reading.service import ReadItem, ReadPlan, SampleListener
from odb_ref.torch.workers.watching import Stops

P = ParamSpec("P")

WATCH_S: Final = 0.5
"""How often a loader process looks whether the training process and its own workers are still there, and says that it is."""

ORPHAN_CODE: Final = 83
"""The exit code of a process that ends because the one that started it is gone: no other code of ours or of Python's."""


_FATAL: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""No process can go on after these."""


class LoaderProcessError(OdbError, RuntimeError):
    """Something failed in the loader process; the text is its traceback."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What has happened in an epoch: a call of a method of its `SampleListener`."""

    epoch: int
    call: methodcaller


@dataclass(frozen=True, slots=True)
class Failure:
    """Reading or collating has failed in an epoch: why in a line, and the traceback."""

    epoch: int
    cause: str
    traceback: str


Message: TypeAlias = Notice | Failure | str
Pipe: TypeAlias = "Connection[Message, methodcaller | None]"
"""What the loader process sends: what has happened, and as a text what it is doing. What it is sent: calls of methods of
`LoaderServer`, and None to end.
"""


class _Sender:
    """Sends messages in order from a thread of its own, so that no other thread waits for the pipe.

    The training process may wait until its own message is read before it reads ours.
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
            except BaseException as error:  # no shared memory left for a batch, or one that cannot be pickled
                if isinstance(message, Notice):
                    self._send_failure(_make_failure(message.epoch, describe(error), error))

    def _send_failure(self, failure: Failure) -> None:
        try:
            self._pipe.send(failure)
        except OSError:  # the training process is gone
            os._exit(1)


def _make_failure(epoch: int, cause: str, error: BaseException) -> Failure:
    return Failure(epoch, cause, "".join(traceback.format_exception(error)))


class _Reporter:
    """Sends what a `SampleListener` is told in one epoch."""

    def __init__(self, sender: _Sender, epoch: int) -> None:
        self._sender = sender
        self._epoch = epoch

    def _send(self, method: Callable[Concatenate[SampleListener, P], None], *args: P.args, **options: P.kwargs) -> None:
        self._sender.send(Notice(self._epoch, methodcaller(method.__name__, *args, **options)))

    def on_read(self, items: Sequence[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        self._send(SampleListener.on_read, items, is_ended=is_ended, is_full=is_full)

    def on_batch(self, number: int, batch: object) -> None:
        self._send(SampleListener.on_batch, number, pack(batch))

    def on_warning(self, text: str) -> None:
        self._send(SampleListener.on_warning, text)

    def on_bad(self, place: int, cause: str) -> None:
        self._send(SampleListener.on_bad, place, cause)

    def on_error(self, cause: str, error: BaseException) -> None:
        self._sender.send(_make_failure(self._epoch, cause, error))


def _is_orphaned(forked_from: int | None) -> bool:
    """Returns True when the process that started this one is gone: a fork server, which may have forked it, is not asked.

    What multiprocessing keeps to tell by is a pipe, whose end may be closed by mistake or with the object that stands for this
    process: so where that says that it is gone, the operating system has to say the same.
    """
    if forked_from is not None:
        return os.getppid() != forked_from
    parent = multiprocessing.parent_process()
    return parent is None or parent.pid is None or (not parent.is_alive() and not _is_there(parent.pid))


def _is_there(pid: int) -> bool:
    try:
        status = read_status(pid)
    except OSError:  # it cannot be told
        return True
    return status is not None and not status.is_ended


def _watch(forked_from: int | None, look: Callable[[], object]) -> None:
    """Ends this process when the one that started it is gone; has a look now and then."""
    while not _is_orphaned(forked_from):
        look()
        time.sleep(WATCH_S)
    os._exit(ORPHAN_CODE)


def _start_watch(forked_from: int | None, look: Callable[[], object] = lambda: None) -> None:
    threading.Thread(target=_watch, args=(forked_from, look), name="odb-watch", daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTask:
    """What a loader process starts with: its first epoch is not sent, so that starting one never waits for it."""

    spec: PipelineSpec
    pipe: Pipe
    other_end: Connection[methodcaller | None, Message] | None
    """A forked copy, which would hide that the training process is gone."""
    forked_from: int | None
    epoch: int
    plan: ReadPlan
    read_ahead: int
    handled_signals: tuple[int, ...]
    """Those that the user handles, in the training process."""


def serve(task: LoaderTask) -> None:
    """Runs the loader process: does what it is told until it is told to end, or the training process is gone."""
    if task.other_end is not None:
        task.other_end.close()
    _shield(task.handled_signals)
    torch.set_num_threads(1)
    if task.spec.options.multiprocessing_context == "forkserver":
        # This process has a fork server of its own, and all that it forks would import torch anew.
        multiprocessing.set_forkserver_preload(["__main__", __name__])
    spec, sender = task.spec, _Sender(task.pipe)
    # Torch's own watch does not end a worker that has more to send than the pipe holds: it waits for a reader that is gone.
    watch = partial(_start_watch, None if task.forked_from is None else os.getpid())
    try:
        server = LoaderServer(replace(spec, options=replace(spec.options, process_init_fn=watch)), sender)
    except BaseException as error:  # whatever a DataLoader refuses, or the data set's length raises
        _Reporter(sender, task.epoch).on_error(describe(error), error)
        sender.close()
        return

    def look() -> None:
        server.check_workers(WATCH_S)
        sender.send(server.describe())

    _start_watch(task.forked_from, look)
    server.begin_epoch(task.epoch, task.plan, task.read_ahead, task.handled_signals)
    with contextlib.suppress(EOFError, ConnectionResetError):  # the training process is gone
        while (call := task.pipe.recv()) is not None:
            call(server)
    # A reader waits for a dead worker for seconds, for one that never answers for ever: the process ends without it.
    if server.check_workers():
        server.close()
    sender.close()
    for worker in multiprocessing.active_children():
        worker.kill()


def _shield(handled: Iterable[int]) -> None:
    """Ignores signals that the user handles here: the handlers are for the training process to run, and what is sent to
    all processes of a job must not end this one if it does not end that one.

    Not by ignoring them: that would pass on to programs that a data set starts.
    """
    for number in handled:
        signal.signal(number, signal.SIG_DFL if number in _FATAL else _do_nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, or a DataLoader's own: then no worker's end is seen here


def _do_nothing(number: int, frame: object) -> None:
    """Answers a signal."""


class LoaderServer(ReadPipeline):
    """Does what the training process asks for, and looks after its workers."""

    def __init__(self, spec: PipelineSpec, sender: _Sender) -> None:
        super().__init__(spec, is_inline=False)
        self._sender = sender
        self._stops = Stops(spec.options.silence_s)
        self._reporter: _Reporter | None = None
        """Who is told that a worker is gone; None between two epochs."""

    def begin_epoch(self, epoch: int, plan: ReadPlan, read_ahead: int, handled_signals: tuple[int, ...]) -> None:
        """Begins an epoch, as a process does whose user handles these signals; the one before has ended."""
        _shield(handled_signals)
        self._reporter, reporter = None, _Reporter(self._sender, epoch)
        try:
            self.begin(plan, reporter, read_ahead)
        except BaseException as error:  # whatever a sampler or a data set raises
            reporter.on_error(describe(error), error)
        # Not before: workers that have died since the last epoch, and are replaced now, do not concern this one.
        self._reporter = reporter

    def end(self) -> None:
        """Ends the epoch; its workers stay for the next."""
        self._reporter = None
        super().end()

    def check_workers(self, seconds: float = 0.0) -> bool:
        """Looks at the workers, ``seconds`` after the last time. Returns False when one has died, or was stopped for too long;
        the epoch has then failed. Torch itself looks every five seconds, and only for the dead.
        """
        reporter = self._reporter  # first: a worker of an epoch that ends meanwhile does not concern the next
        if (worker := self.find_dead_worker()) is not None:
            _tell(reporter, f"{_describe(worker)} exited unexpectedly (exit code {worker.exitcode})")
            return False
        if (stopped := self._stops.look(self.processes, seconds)) is not None:
            worker, how = stopped
            _tell(reporter, f"{_describe(worker)} {how}")
            worker.kill()  # then nobody waits for it any longer, and the next epoch begins without it
            return False
        return True


def _describe(worker: BaseProcess) -> str:
    is_collating = worker.name.startswith(collate_workers.NAME)
    return f"{'the process that collates' if is_collating else 'DataLoader worker'} (pid {worker.pid})"


def _tell(reporter: _Reporter | None, cause: str) -> None:
    if reporter is not None:
        reporter.on_error(cause, RuntimeError(cause))
