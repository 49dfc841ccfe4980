"""The end of a loader where samples are read and batches formed, in a process of its own.

So reading, collating and the protocol's state machine never hold the interpreter lock of the process that trains. The loader
process runs a `ThreadBackend` and, under it, the workers of the inner DataLoader. Samples never enter the training process: it
learns what the machine has decided, and receives finished batches. Their large tensors lie in shared memory, small ones come
as bytes: handing over a shared-memory file takes several times as long, most of it with the interpreter lock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Final, TypeAlias

import torch
import torch.multiprocessing

from odb_ref.core.config import Config
from odb_ref.core.errors import OdbError
from odb_ref.core.events import Event
from odb_ref.torch.backend import ThreadBackend
from odb_ref.torch.engine import EngineSpec
from odb_ref.torch.epoch import EpochStart, Listener, Update
from odb_ref.torch.packing import pack, unpack
from odb_ref.torch.workbench import describe, pin

JOIN_S: Final = 10.0
"""How long a loader process may take to end its workers."""

CONCLUDE_S: Final = 5.0
"""How long the end of an epoch waits for its trace."""

WATCH_S: Final = 0.5
"""How often a loader process looks whether the training process and its own workers are still there, and says that it is."""

SILENCE_S: Final = 60.0
"""After so long without a word a loader process is taken for lost: it is stopped, or was forked while a lock was held."""

Link: TypeAlias = "Connection[object, object]"


@dataclass(frozen=True, slots=True)
class _Told:
    """An event of the trainer's end."""

    epoch: int
    event: Event
    at_s: float | None


class LoaderProcessError(OdbError, RuntimeError):
    """Something failed in the loader process; the text is its traceback."""


# In the loader process ---------------------------------------------------------------------------------------------------


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
class _Task:
    """What a loader process starts with: its first epoch is not sent, so that starting one never waits for it."""

    config: Config
    spec: EngineSpec
    connection: Link
    other_end: Link | None
    """A forked copy, which would hide that the training process is gone."""
    forked_from: int | None
    epoch: int
    start: EpochStart


def _serve(task: _Task) -> None:
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
            case _Told() as told:
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


# In the training process -------------------------------------------------------------------------------------------------


class ProcessBackend:
    """A process, which outlives the epoch if its workers do. See `odb_ref.torch.epoch.Backend`."""

    def __init__(self, config: Config, spec: EngineSpec) -> None:
        context = spec.options.multiprocessing_context
        self._context = (
            context if isinstance(context, BaseContext) else torch.multiprocessing.get_context(_name(context))
        )
        # Pages are locked in the training process, and the process is already of the kind asked for.
        options = replace(
            spec.options, is_pinned=False, multiprocessing_context=self._context.get_start_method(allow_none=False)
        )
        self._config = config
        self._spec = replace(spec, options=options)
        self._is_pinned = spec.options.is_pinned
        self._is_persistent = spec.options.persistent_workers
        self._process: BaseProcess | None = None
        self._connection: Link | None = None
        self._receiver: threading.Thread | None = None
        self._epoch = 0
        self._listener: Listener | None = None
        self._is_traced = False
        self._concluded = threading.Event()
        # Batches of a round that is not complete yet; only the receiving thread touches them.
        self._arrived: list[tuple[int, object]] = []
        self._arrived_epoch = 0

    def begin(self, start: EpochStart, listener: Listener) -> None:
        """Starts the process, unless it is there, and an epoch.

        Raises: what sending the data set to a process raises.
        """
        if self._process is not None and not self._process.is_alive():
            self.close()  # it died between two epochs
        self._epoch += 1
        self._listener = listener
        self._is_traced = start.trace is not None
        self._concluded.clear()
        if self._connection is None:
            self._start(start)
        else:
            self._send(("begin", self._epoch, start))

    def _start(self, start: EpochStart) -> None:
        ours, theirs = self._context.Pipe()
        is_forked = self._context.get_start_method() == "fork"
        task = _Task(
            config=self._config,
            spec=self._spec,
            connection=theirs,
            other_end=ours if is_forked else None,
            forked_from=os.getpid() if is_forked else None,
            epoch=self._epoch,
            start=start,
        )
        # Not a daemon: daemons may have no children. It ends with the training process all the same.
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(task,), name="odb-loader", daemon=False
        )
        process.start()
        theirs.close()
        self._process, self._connection = process, ours
        self._receiver = threading.Thread(target=self._receive, args=(ours, process), name="odb-receive", daemon=True)
        self._receiver.start()

    def _send(self, message: object) -> None:
        if self._connection is not None:
            # When the process is gone the receiver says so.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._connection.send(message)

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Sends an event to the machine."""
        self._send(_Told(self._epoch, event, at_s))

    def conclude(self) -> None:
        """Waits until the trace is complete."""
        if self._is_traced and self._listener is not None:
            self._send(("conclude", self._epoch))
            self._concluded.wait(CONCLUDE_S)

    def end(self) -> None:
        """Ends the epoch, and the process unless its workers persist."""
        self._listener = None
        if self._is_persistent:
            self._send(("end",))
        else:
            self.close()

    def close(self) -> None:
        """Ends the process and its workers."""
        self._listener = None
        self._send(("close",))
        process, connection, receiver = self._process, self._connection, self._receiver
        self._process = self._connection = self._receiver = None
        if receiver is not None:
            receiver.join(JOIN_S)
        if process is not None:
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
        if connection is not None:
            connection.close()

    def _receive(self, connection: Link, process: BaseProcess) -> None:
        # What `Connection.poll` does, at less than half the price: every step pays it.
        selector = selectors.DefaultSelector()
        selector.register(connection, selectors.EVENT_READ)
        silence_s = 0.0
        while True:
            try:
                if selector.select(WATCH_S):
                    silence_s = 0.0
                    self._dispatch(connection.recv())
                    continue
                # A killed process does not end the connection before its workers end too: they hold copies of its end.
                if not process.is_alive() and not connection.poll():
                    raise EOFError
                silence_s += WATCH_S  # not by the clock: if the whole job is stopped for a while, nobody is lost
                if silence_s >= SILENCE_S:
                    process.kill()
                    self._lose(f"the loader process was not heard of for {SILENCE_S:g} s", TimeoutError())
            except (EOFError, ConnectionResetError) as error:
                selector.close()
                if self._listener is not None:
                    process.join(1.0)
                    self._lose(f"the loader process exited unexpectedly (exit code {process.exitcode})", error)
                return
            except Exception as error:  # a batch that cannot be rebuilt here
                self._lose(describe(error), error)

    def _lose(self, cause: str, error: BaseException) -> None:
        listener, self._listener = self._listener, None
        self._concluded.set()
        if listener is not None:
            listener.on_lost(cause, error)

    def _dispatch(self, message: object) -> None:
        match message:
            case (int(epoch), "concluded"):
                if epoch == self._epoch:
                    self._concluded.set()
            case (int(epoch), *rest):
                if self._listener is not None and epoch == self._epoch:
                    self._report(epoch, tuple(rest), self._listener)
            case _:
                raise OdbError(f"unexpected message of the loader process: {message!r}")

    def _report(self, epoch: int, message: tuple[object, ...], listener: Listener) -> None:
        match message:
            case ("update", Update() as update):
                listener.on_update(update)
            case ("bad", int(place), str(cause)):
                listener.on_bad(place, cause)
            case ("batch", int(number), packed):
                if epoch != self._arrived_epoch:
                    self._arrived_epoch, self._arrived = epoch, []
                batch = unpack(packed)
                self._arrived.append((number, pin(batch) if self._is_pinned else batch))
            case ("collated", int(round_)):
                batches = self._arrived if epoch == self._arrived_epoch else []
                self._arrived = []
                listener.on_collated(round_, batches)
            case ("error", str(text)):
                listener.on_error(LoaderProcessError(text))
            case ("broken", error):
                listener.on_broken(error if isinstance(error, OdbError) else LoaderProcessError(str(error)))
            case ("lost", str(cause), str(text)):
                self._lose(cause, LoaderProcessError(text))
            case _:
                raise OdbError(f"unexpected message of the loader process: {message!r}")


def _name(context: object) -> str | None:
    return context if isinstance(context, str) else None
