"""Reading and collating in a process of their own, so that neither holds the interpreter lock of the one that trains.

The loader process runs a `ThreadEngine` and, under it, the workers of the inner DataLoader. Samples never enter the training
process: it learns their measures, and receives finished batches. Their large tensors lie in shared memory, small ones come as
bytes: handing over a shared-memory file takes several times as long, most of it with the interpreter lock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Final, TypeAlias

import torch
import torch.multiprocessing

from odb_ref.core.errors import OdbError
from odb_ref.torch.engine import EngineSpec, Listener, ReadItem, ReadPlan, ThreadEngine
from odb_ref.torch.packing import pack, unpack
from odb_ref.torch.workbench import BatchOrder, describe, pin

JOIN_S: Final = 10.0
"""How long a loader process may take to end its workers."""

WATCH_S: Final = 0.5
"""How often a loader process looks whether the training process and its own workers are still there."""

Link: TypeAlias = "Connection[object, object]"


class LoaderProcessError(OdbError, RuntimeError):
    """Something failed in the loader process; the text is its traceback."""


# In the loader process ---------------------------------------------------------------------------------------------------


class _Reporter:
    """The listener of one epoch: sends on what the engine reports."""

    def __init__(self, connection: Link, lock: threading.Lock, epoch: int) -> None:
        self._connection = connection
        self._lock = lock
        self._epoch = epoch

    def _send(self, *message: object) -> None:
        # The training process may be gone; then this one is about to end too.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), self._lock:
            self._connection.send((self._epoch, *message))

    def on_read(self, items: list[ReadItem], is_ended: bool) -> None:
        self._send("read", items, is_ended)

    def on_bad(self, place: int, cause: str) -> None:
        self._send("bad", place, cause)

    def on_collated(self, round_: int, batches: Sequence[tuple[int, object]]) -> None:
        # One message for each: receiving one large one takes more than twice as long as its parts.
        for number, batch in batches:
            self._send("batch", number, pack(batch))
        self._send("collated", round_)

    def on_error(self, cause: str, error: BaseException) -> None:
        self._send("error", cause, "".join(traceback.format_exception(error)))


def _is_orphaned(forked_from: int | None) -> bool:
    """True when the training process is gone: whatever else has forked this process is not asked, a fork server stays."""
    if forked_from is not None:
        return os.getppid() != forked_from
    parent = multiprocessing.parent_process()
    return parent is None or not parent.is_alive()


def _end_when_orphaned(forked_from: int | None) -> None:
    while not _is_orphaned(forked_from):
        time.sleep(WATCH_S)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class _WorkerInit:
    """What a worker does first: it sees to it that it does not outlive the loader process, then does what the user asked for.

    Torch's own watch does not end a worker that has more to send than the pipe holds: it waits for a reader that is gone.
    """

    init_fn: object
    forked_from: int | None

    def __call__(self, worker_id: int) -> None:
        threading.Thread(target=_end_when_orphaned, args=(self.forked_from,), name="odb-watch", daemon=True).start()
        if callable(self.init_fn):
            self.init_fn(worker_id)


def _serve(spec: EngineSpec, connection: Link, other_end: Link | None, forked_from: int | None) -> None:
    """The loader process: does what it is told until it is told to end, or the training process is gone."""
    if other_end is not None:
        other_end.close()  # a forked copy, which would hide that the training process is gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process to handle
    torch.set_num_threads(1)
    lock = threading.Lock()
    init_fn = _WorkerInit(spec.options.worker_init_fn, None if forked_from is None else os.getpid())
    try:
        engine = ThreadEngine(replace(spec, options=replace(spec.options, worker_init_fn=init_fn)))
    except Exception as error:  # whatever a DataLoader refuses
        _Reporter(connection, lock, 1).on_error(describe(error), error)
        return
    reporter: _Reporter | None = None
    while True:
        try:
            while not connection.poll(WATCH_S) and not _is_orphaned(forked_from):
                # Torch itself looks only every five seconds.
                dead = engine.find_dead_worker()
                if dead is not None and reporter is not None:
                    cause = f"DataLoader worker (pid {dead.pid}) exited unexpectedly (exit code {dead.exitcode})"
                    reporter.on_error(cause, LoaderProcessError(cause))
            message = ("close",) if _is_orphaned(forked_from) else connection.recv()
        except (EOFError, ConnectionResetError):
            message = ("close",)
        match message:
            case ("begin", int(epoch), ReadPlan() as plan, int(read_ahead)):
                reporter = _Reporter(connection, lock, epoch)
                engine.begin(plan, reporter, read_ahead)
            case ("read", int(count)):
                engine.read(count)
            case ("collate", int(round_), tuple(orders)):
                engine.collate(round_, orders)
            case ("end",):
                reporter = None
                engine.end()
            case _:
                # A reader waits for a dead worker for seconds; the process ends without it, and ends the other workers.
                if engine.find_dead_worker() is None:
                    engine.close()
                return


# In the training process -------------------------------------------------------------------------------------------------


class ProcessEngine:
    """An engine in a process of its own. With persistent workers it outlives the epoch, as they do."""

    def __init__(self, spec: EngineSpec) -> None:
        context = spec.options.multiprocessing_context
        self._context = (
            context if isinstance(context, BaseContext) else torch.multiprocessing.get_context(_name(context))
        )
        # Pages are locked in the training process, and the process is already of the kind asked for.
        options = replace(
            spec.options, is_pinned=False, multiprocessing_context=self._context.get_start_method(allow_none=False)
        )
        self._spec = replace(spec, options=options)
        self._is_pinned = spec.options.is_pinned
        self._is_persistent = spec.options.persistent_workers
        self._process: BaseProcess | None = None
        self._connection: Link | None = None
        self._receiver: threading.Thread | None = None
        self._epoch = 0
        self._listener: Listener | None = None
        # Batches of a round that is not complete yet; only the receiving thread touches them.
        self._arrived: list[tuple[int, object]] = []
        self._arrived_epoch = 0

    def begin(self, plan: ReadPlan, listener: Listener, read_ahead: int) -> None:
        """Starts the process, unless it is there."""
        self._epoch += 1
        self._listener = listener
        if self._connection is None:
            self._start()
        self._send("begin", self._epoch, plan, read_ahead)

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        is_forked = self._context.get_start_method() == "fork"
        arguments = (self._spec, theirs, ours if is_forked else None, os.getpid() if is_forked else None)
        # Not a daemon: daemons may have no children. It ends with the training process all the same.
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_serve, args=arguments, name="odb-loader", daemon=False
        )
        process.start()
        theirs.close()
        self._process, self._connection = process, ours
        self._receiver = threading.Thread(target=self._receive, args=(ours, process), name="odb-receive", daemon=True)
        self._receiver.start()

    def _send(self, *message: object) -> None:
        if self._connection is not None:
            # When the process is gone the receiver says so.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._connection.send(message)

    def read(self, count: int) -> None:
        """Asks for samples; does not wait."""
        self._send("read", count)

    def collate(self, round_: int, orders: tuple[BatchOrder, ...]) -> None:
        """Asks for the batches of a round; does not wait."""
        self._send("collate", round_, orders)

    def stop(self) -> None:
        """Reports nothing more."""
        self._listener = None

    def end(self) -> None:
        """Ends the epoch, and the process unless its workers persist."""
        self._listener = None
        if self._is_persistent:
            self._send("end")
        else:
            self.close()

    def close(self) -> None:
        """Ends the process and its workers."""
        self._listener = None
        self._send("close")
        process, connection, receiver = self._process, self._connection, self._receiver
        self._process = self._connection = self._receiver = None
        if receiver is not None:
            receiver.join(JOIN_S)
        if process is not None:
            process.join(JOIN_S)
            if process.is_alive():
                process.terminate()
                process.join(JOIN_S)
        if connection is not None:
            connection.close()

    def _receive(self, connection: Link, process: BaseProcess) -> None:
        try:
            while True:
                # A killed process does not end the connection before its workers end too: they hold copies of its end.
                while not connection.poll(WATCH_S):
                    if not process.is_alive() and not connection.poll():
                        raise EOFError
                self._dispatch(connection.recv())
        except (EOFError, ConnectionResetError) as error:
            listener = self._listener
            if listener is not None:
                process.join(1.0)
                listener.on_error(f"the loader process exited unexpectedly (exit code {process.exitcode})", error)
        except Exception as error:  # a batch that cannot be rebuilt here
            if self._listener is not None:
                self._listener.on_error(describe(error), error)

    def _dispatch(self, message: object) -> None:
        listener = self._listener
        if listener is None:
            return
        match message:
            case (int(epoch), *_) if epoch != self._epoch:
                return
            case (_, "read", list(items), bool(is_ended)):
                listener.on_read(items, is_ended)
            case (_, "bad", int(place), str(cause)):
                listener.on_bad(place, cause)
            case (int(epoch), "batch", int(number), packed):
                if epoch != self._arrived_epoch:
                    self._arrived_epoch, self._arrived = epoch, []
                batch = unpack(packed)
                self._arrived.append((number, pin(batch) if self._is_pinned else batch))
            case (int(epoch), "collated", int(round_)):
                batches = self._arrived if epoch == self._arrived_epoch else []
                self._arrived = []
                listener.on_collated(round_, batches)
            case (_, "error", str(cause), str(text)):
                listener.on_error(cause, LoaderProcessError(text))
            case _:
                raise OdbError(f"unexpected message of the loader process: {message!r}")


def _name(context: object) -> str | None:
    return context if isinstance(context, str) else None
