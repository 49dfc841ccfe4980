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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Final, TypeAlias

import torch

from odb_ref.core.config import Config
from odb_ref.core.errors import OdbError
from odb_ref.core.events import Event
from odb_ref.torch.backend import ThreadBackend
from odb_ref.torch.engine import EngineSpec
from odb_ref.torch.epoch import EpochStart, Update
from odb_ref.torch.packing import pack
from odb_ref.torch.workbench import describe

WATCH_S: Final = 0.5
"""How often a loader process looks whether the training process and its own workers are still there, and says that it is."""

Link: TypeAlias = "Connection[object, object]"


@dataclass(frozen=True, slots=True)
class Told:
    """An event of the trainer's end."""

    epoch: int
    event: Event
    at_s: float | None


class LoaderProcessError(OdbError, RuntimeError):
    """Something failed in the loader process; the text is its traceback."""


class _Sender:
    """Sends messages in order from a thread of its own: whoever has something to say never waits for the pipe.

    The training process may wait until its own message is read before it reads ours.
    """

    def __init__(self, connection: Link) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[object, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="odb-send", daemon=True)
        self._thread.start()

    def send(self, *message: object) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """When it returns all is sent."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send(message)
            except Exception as error:  # no shared memory left for a batch, say
                self._send_loss(message[0], error)

    def _send_loss(self, epoch: object, error: Exception) -> None:
        try:
            self._connection.send((epoch, "lost", describe(error), _format(error)))
        except OSError:  # the training process is gone
            os._exit(1)


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class _Reporter:
    """The trainer's end of one epoch, as the loader process sees it."""

    def __init__(self, sender: _Sender, epoch: int) -> None:
        self._sender = sender
        self._epoch = epoch

    def on_update(self, update: Update) -> None:
        self._sender.send(self._epoch, "update", update)

    def on_collated(self, round_: int, batches: Sequence[tuple[int, object]]) -> None:
        # One message for each: receiving one large one takes more than twice as long as its parts.
        for number, batch in batches:
            self._sender.send(self._epoch, "batch", number, pack(batch))
        self._sender.send(self._epoch, "collated", round_)

    def on_bad(self, place: int, cause: str) -> None:
        self._sender.send(self._epoch, "bad", place, cause)

    def on_error(self, error: BaseException) -> None:
        self._sender.send(self._epoch, "error", _format(error))

    def on_broken(self, error: Exception) -> None:
        self._sender.send(self._epoch, "broken", error if isinstance(error, OdbError) else _format(error))

    def on_lost(self, cause: str, error: BaseException) -> None:
        self._sender.send(self._epoch, "lost", cause, _format(error))


def _is_orphaned(forked_from: int | None) -> bool:
    """True when the process that started this one is gone: a fork server, which may have forked it, is not asked."""
    if forked_from is not None:
        return os.getppid() != forked_from
    parent = multiprocessing.parent_process()
    return parent is None or not parent.is_alive()


def _watch(forked_from: int | None, look: Callable[[], object]) -> None:
    """Ends this process when the one that started it is gone; has a look now and then."""
    while not _is_orphaned(forked_from):
        look()
        time.sleep(WATCH_S)
    os._exit(1)


def _start_watch(forked_from: int | None, look: Callable[[], object] = lambda: None) -> None:
    threading.Thread(target=_watch, args=(forked_from, look), name="odb-watch", daemon=True).start()


@dataclass(frozen=True, slots=True)
class _WorkerInit:
    """What a worker does first: it sees to it that it does not outlive the loader process, then does what the user asked for.

    Torch's own watch does not end a worker that has more to send than the pipe holds: it waits for a reader that is gone.
    """

    init_fn: object
    forked_from: int | None

    def __call__(self, worker_id: int) -> None:
        _start_watch(self.forked_from)
        if callable(self.init_fn):
            self.init_fn(worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a loader process starts with: its first epoch is not sent, so that starting one never waits for it."""

    config: Config
    spec: EngineSpec
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
    torch.set_num_threads(1)
    sender = _Sender(connection)
    init_fn = _WorkerInit(spec.options.worker_init_fn, None if forked_from is None else os.getpid())
    try:
        backend = ThreadBackend(task.config, replace(spec, options=replace(spec.options, worker_init_fn=init_fn)))
    except Exception as error:  # whatever a DataLoader refuses
        _Reporter(sender, task.epoch).on_lost(describe(error), error)
        sender.close()
        return

    def look() -> None:
        backend.check_workers()
        sender.send(0, "alive")

    _start_watch(forked_from, look)
    message: object = ("begin", task.epoch, task.start)
    epoch = task.epoch
    while True:
        match message:
            case ("begin", int(epoch), EpochStart() as start):
                reporter = _Reporter(sender, epoch)
                try:
                    backend.begin(start, reporter)
                except Exception as error:  # a trace that cannot be written, say
                    reporter.on_lost(describe(error), error)
            case Told() as told:
                if told.epoch == epoch:
                    backend.submit(told.event, told.at_s)
            case ("conclude", int(number)):
                backend.conclude()
                sender.send(number, "concluded")
            case ("end",):
                backend.end()
            case _:
                # A reader waits for a dead worker for seconds; the process ends without it, and ends the other workers.
                if backend.check_workers():
                    backend.close()
                sender.close()
                return
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            message = ("close",)
