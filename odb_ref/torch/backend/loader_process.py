"""The loader process: a `ThreadBackend`, told over a connection what to do, and the workers of the inner DataLoader under it.

It ends when it is told to, or with the process that has started it.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

import torch

from odb_ref.core.config import Config
from odb_ref.core.errors import OdbError
from odb_ref.torch.backend.messages import Update
from odb_ref.torch.backend.thread_backend import ThreadBackend
from odb_ref.torch.backend.wire import (
    Alive,
    Answer,
    Batch,
    BeginEpoch,
    Broken,
    CloseTrace,
    Doubt,
    EndEpoch,
    Exit,
    Link,
    Lost,
    Notice,
    Order,
    ReadFailed,
    Report,
    RoundCollated,
    SetAside,
    Submit,
    TraceClosed,
)
from odb_ref.torch.exchange.process_table import look_at
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.pipeline import PipelineSpec
from odb_ref.torch.reading.serialization import pack

WATCH_S: Final = 0.5
"""How often a loader process looks whether the training process and its own workers are still there, and says that it is."""

ORPHAN_CODE: Final = 83
"""The exit code of a process that ends because the one that started it is gone: no other code of ours or of Python's."""


class LoaderProcessError(OdbError, RuntimeError):
    """Something failed in the loader process; the text is its traceback."""


class _Sender:
    """Sends messages in order from a thread of its own: whoever has something to say never waits for the pipe.

    The training process may wait until its own message is read before it reads ours.
    """

    def __init__(self, connection: Link) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="odb-send", daemon=True)
        self._thread.start()

    def send(self, message: Answer) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send(message)
            except BaseException as error:  # no shared memory left for a batch, or one that cannot be pickled
                if isinstance(message, Report):
                    self._send_loss(message.epoch, error)

    def _send_loss(self, epoch: int, error: BaseException) -> None:
        try:
            self._connection.send(Report(epoch, Lost(describe(error), _format(error))))
        except OSError:  # the training process is gone
            os._exit(1)


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class _Reporter:
    """The trainer's side of one epoch, as the loader process sees it: a `Listener` that sends what it is told."""

    def __init__(self, sender: _Sender, epoch: int) -> None:
        self._sender = sender
        self.epoch = epoch

    def send(self, notice: Notice) -> None:
        self._sender.send(Report(self.epoch, notice))

    def on_update(self, update: Update) -> None:
        self.send(update)

    def on_batch(self, number: int, batch: object) -> None:
        self.send(Batch(number, pack(batch)))

    def on_collated(self, round_: int) -> None:
        self.send(RoundCollated(round_))

    def on_doubt(self, text: str) -> None:
        self.send(Doubt(text))

    def on_bad(self, place: int, cause: str) -> None:
        self.send(SetAside(place, cause))

    def on_error(self, error: BaseException) -> None:
        self.send(ReadFailed(_format(error)))

    def on_broken(self, error: Exception) -> None:
        self.send(Broken(error if isinstance(error, OdbError) else _format(error)))

    def on_lost(self, cause: str, error: BaseException) -> None:
        self.send(Lost(cause, _format(error)))


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
        look = look_at(pid)
    except OSError:  # it cannot be told
        return True
    return look is not None and not look.is_ended


def _watch(forked_from: int | None, look: Callable[[], object]) -> None:
    """Ends this process when the one that started it is gone; has a look now and then."""
    while not _is_orphaned(forked_from):
        look()
        time.sleep(WATCH_S)
    os._exit(ORPHAN_CODE)


def _start_watch(forked_from: int | None, look: Callable[[], object] = lambda: None) -> None:
    threading.Thread(target=_watch, args=(forked_from, look), name="odb-watch", daemon=True).start()


@dataclass(frozen=True, slots=True)
class _WorkerInit:
    """What a worker does first: it sees to it that it does not outlive the loader process, then does what the user asked for.

    Torch's own watch does not end a worker that has more to send than the pipe holds: it waits for a reader that is gone.
    """

    watch: Callable[[], None]
    init_fn: object

    def __call__(self, worker_id: int) -> None:
        self.watch()
        if callable(self.init_fn):
            self.init_fn(worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a loader process starts with: its first epoch is not sent, so that starting one never waits for it."""

    config: Config
    spec: PipelineSpec
    connection: Link
    other_end: Link | None
    """A forked copy, which would hide that the training process is gone."""
    forked_from: int | None
    epoch: int
    start: EpochStart


def serve(task: Task) -> None:
    """The loader process: does what it is told until it is told to end, or the training process is gone."""
    if task.other_end is not None:
        task.other_end.close()
    connection, forked_from, spec = task.connection, task.forked_from, task.spec
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # a plain DataLoader there has left what raises here when a worker dies
    torch.set_num_threads(1)
    sender = _Sender(connection)
    watch = partial(_start_watch, None if forked_from is None else os.getpid())
    init_fn = _WorkerInit(watch, spec.options.worker_init_fn)
    options = replace(spec.options, worker_init_fn=init_fn, collator_init_fn=watch)
    try:
        backend = ThreadBackend(task.config, replace(spec, options=options))
    except BaseException as error:  # whatever a DataLoader refuses, or the data set's length raises
        _Reporter(sender, task.epoch).on_lost(describe(error), error)
        sender.close()
        return

    def look() -> None:
        backend.check_workers(WATCH_S)
        sender.send(Alive(backend.describe()))

    _start_watch(forked_from, look)
    _obey(connection, sender, backend, BeginEpoch(task.epoch, task.start))
    # A reader waits for a dead worker for seconds, for one that never answers for ever: the process ends without it.
    if backend.check_workers():
        backend.close()
    sender.close()
    for worker in multiprocessing.active_children():
        worker.kill()


def _obey(connection: Link, sender: _Sender, backend: ThreadBackend, order: Order) -> None:
    """Does what it is told, ``order`` first, until it is told to end or nobody is there to tell it."""
    reporter = _Reporter(sender, 0)
    while True:
        match order:
            case BeginEpoch(epoch, start):
                reporter = _Reporter(sender, epoch)
                try:
                    backend.begin(start, reporter)
                except BaseException as error:  # a trace that cannot be written, say
                    reporter.on_lost(describe(error), error)
            case Submit(epoch, event, at_s):
                if epoch == reporter.epoch:
                    backend.submit(event, at_s)
            case CloseTrace(epoch):
                backend.close_trace()
                sender.send(TraceClosed(epoch))
            case EndEpoch():
                backend.end()
            case Exit():
                return
            case _:
                assert_never(order)
        try:
            order = _receive(connection)
        except (EOFError, ConnectionResetError):
            return


def _receive(connection: Link) -> Order:
    order = connection.recv()
    if not isinstance(order, Order):
        raise OdbError(f"unexpected message of the training process: {order!r}")
    return order
