"""The end of a loader where samples are read and batches formed, in a process of its own.

So reading, collating and the protocol's state machine never hold the interpreter lock of the process that trains. Samples never
enter it: it learns what the machine has decided, and receives finished batches. Their large tensors lie in shared memory,
small ones come as bytes: handing over a shared-memory file takes several times as long, most of it with the interpreter lock.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Final

import torch.multiprocessing

from odb_ref.core.config import Config
from odb_ref.core.errors import OdbError
from odb_ref.core.events import Event
from odb_ref.torch.engine import EngineSpec
from odb_ref.torch.epoch import EpochStart, Listener, Update
from odb_ref.torch.loader_process import WATCH_S, Link, LoaderProcessError, Task, Told, serve
from odb_ref.torch.packing import unpack
from odb_ref.torch.workbench import describe, pin

JOIN_S: Final = 10.0
"""How long a loader process may take to end its workers."""

CONCLUDE_S: Final = 5.0
"""How long the end of an epoch waits for its trace."""

SILENCE_S: Final = 30.0
"""After so long without a word a loader process is taken for lost: it is stopped, or was forked while a lock was held."""


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
        self._lock = threading.Lock()
        self._is_spoilt = False
        """True when the process is gone, or has lost a worker or anything else: the next epoch needs another."""
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
        with self._lock:
            is_alive = self._process is not None and self._process.is_alive() and not self._is_spoilt
            self._epoch += 1
            self._listener = listener if is_alive else None
            self._is_traced = start.trace is not None
            self._concluded.clear()
        if not is_alive:
            self.close()  # what is left of one that was lost in an epoch, or died between two
            self._listener = listener
            self._start(start)
        else:
            self._send(("begin", self._epoch, start))

    def _start(self, start: EpochStart) -> None:
        self._is_spoilt = False
        ours, theirs = self._context.Pipe()
        is_forked = self._context.get_start_method() == "fork"
        task = Task(
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
            target=serve, args=(task,), name="odb-loader", daemon=False
        )
        process.start()
        theirs.close()
        self._process, self._connection = process, ours
        self._receiver = threading.Thread(target=self._receive, args=(ours, process), name="odb-receive", daemon=True)
        self._receiver.start()

    def _send(self, message: object) -> None:
        connection = self._connection
        if connection is not None:
            # When the process is gone the receiver says so.
            with contextlib.suppress(OSError):
                connection.send(message)

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Sends an event to the machine."""
        self._send(Told(self._epoch, event, at_s))

    def conclude(self) -> None:
        """Waits until the trace is complete."""
        if self._is_traced and self._listener is not None:
            self._send(("conclude", self._epoch))
            self._concluded.wait(CONCLUDE_S)

    def end(self) -> None:
        """Ends the epoch, and the process unless its workers persist."""
        self._listener = None
        if self._is_persistent and not self._is_spoilt:
            self._send(("end",))
        else:
            self.close()

    def close(self) -> None:
        """Ends the process and its workers."""
        self._listener = None
        self._send(("close",))
        process, connection, receiver = self._process, self._connection, self._receiver
        self._process = self._connection = self._receiver = None
        # Two threads that wait for one process may both miss that it has ended: first the receiver, then this one.
        if process is not None and not wait([process.sentinel], JOIN_S):
            process.kill()
        if receiver is not None:
            receiver.join(JOIN_S)
        if process is not None:
            process.join()
        if connection is not None:
            connection.close()

    def _receive(self, connection: Link, process: BaseProcess) -> None:
        # What `Connection.poll` does, at less than half the price: every step pays it.
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            # A forked one speaks at once, another must first load what it is to do, which may take any time.
            silence_s, is_heard = 0.0, self._context.get_start_method() == "fork"
            while not connection.closed:
                try:
                    if selector.select(WATCH_S):
                        silence_s, is_heard = 0.0, True
                        self._dispatch(connection.recv())
                        continue
                    # A killed process does not end the connection before its workers end too: they hold copies of its end.
                    if not process.is_alive() and not connection.poll():
                        raise EOFError
                    # Not by the clock: if the whole job is stopped for a while, nobody is lost.
                    silence_s += WATCH_S if is_heard else 0.0
                    if silence_s >= SILENCE_S:
                        process.kill()
                        self._lose(f"the loader process was not heard of for {SILENCE_S:g} s", TimeoutError())
                except (EOFError, ConnectionResetError) as error:
                    if self._listener is not None:
                        process.join(1.0)
                    self._lose(f"the loader process exited unexpectedly (exit code {process.exitcode})", error)
                    return
                except Exception as error:  # a batch that cannot be rebuilt here
                    self._lose(describe(error), error)

    def _lose(self, cause: str, error: BaseException) -> None:
        with self._lock:
            self._is_spoilt = True
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
                self._is_spoilt = True
                listener.on_error(LoaderProcessError(text))
            case ("broken", error):
                listener.on_broken(error if isinstance(error, OdbError) else LoaderProcessError(str(error)))
            case ("lost", str(cause), str(text)):
                self._lose(cause, LoaderProcessError(text))
            case _:
                raise OdbError(f"unexpected message of the loader process: {message!r}")


def _name(context: object) -> str | None:
    return context if isinstance(context, str) else None
