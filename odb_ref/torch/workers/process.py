"""The sample service in a process of its own, as the training process sees it.

So reading and collating never hold the interpreter lock of the process that trains. Samples never enter it: it learns how long
they are, and receives finished batches. Their large tensors lie in shared memory, small ones come as bytes: handing over a
shared-memory file takes several times as long, most of it with the interpreter lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from operator import methodcaller
from typing import Concatenate, Final, ParamSpec, TypeAlias

import torch.multiprocessing

from odb_ref.core.errors import UsageError
from odb_ref.torch.exchange.process_table import kill_with_children
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.pipeline import PipelineSpec
from odb_ref.torch.reading.service import BatchRequest, ReadPlan, SampleListener
from odb_ref.torch.workers.serving import (
    WATCH_S,
    Failure,
    LoaderProcessError,
    LoaderServer,
    LoaderTask,
    Message,
    Notice,
    serve,
)
from odb_ref.torch.workers.watching import Silence

P = ParamSpec("P")
Pipe: TypeAlias = "Connection[methodcaller | None, Message]"

JOIN_S: Final = 1.5
"""How long a loader process may take to end its workers, before it is killed with them."""

_UNHEARD: Final = (
    " before it began: one that is not forked runs the main script, whose work belongs below if __name__ == '__main__'"
)

QUIET_S: Final = 2.0
"""A loader process that has done nothing for so long is said to be silent."""


class LoaderProcess:
    """A process, which outlives the epoch if its workers do. See `odb_ref.torch.reading.service.SampleService`."""

    is_inline = False
    has_work = False

    def __init__(self, spec: PipelineSpec) -> None:
        context = spec.options.multiprocessing_context
        self._context = context if isinstance(context, BaseContext) else torch.multiprocessing.get_context(context)
        start_method = self._context.get_start_method(allow_none=False)
        wanted = spec.options.persistent_workers
        self._is_persistent = start_method != "fork" if wanted is None else wanted
        self._is_watching_changes = self._is_persistent and wanted is None
        """True when the process stays only as long as another one would read the same."""
        self._sent = b""
        """A digest of what the process was started with, where that is watched."""
        # The process is already of the kind asked for.
        options = replace(spec.options, multiprocessing_context=start_method, persistent_workers=self._is_persistent)
        self._spec = replace(spec, options=options)
        self._silence_s = spec.options.silence_s
        self._process: BaseProcess | None = None
        self._pipe: Pipe | None = None
        self._receiver: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_spoilt = False
        """True when the process is gone, or has lost a worker or anything else: the next epoch needs another."""
        self._epoch = 0
        self._doing = "starting its loader process"
        self._silence: Silence | None = None
        self._listener: SampleListener | None = None

    def begin(self, plan: ReadPlan, listener: SampleListener, read_ahead: int) -> None:
        """Starts the process, unless it is there, and an epoch.

        Raises: UsageError when the data set or a function cannot be sent to a process.
        """
        digest = _digest(self._spec) if self._is_watching_changes else b""
        with self._lock:
            is_alive = self._process is not None and self._process.is_alive() and not self._is_spoilt
            is_alive = is_alive and digest == self._sent
            self._epoch += 1
            self._listener = listener if is_alive else None
        handled = _list_handled_signals()
        if is_alive:
            self._call(LoaderServer.begin_epoch, self._epoch, plan, read_ahead, handled)
            return
        self.close()  # what is left of one that was lost in an epoch, or died between two
        self._listener = listener
        self._sent = digest
        self._is_spoilt = False
        self._doing = "starting its loader process"
        ours, theirs = self._context.Pipe()
        is_forked = self._context.get_start_method() == "fork"
        task = LoaderTask(
            spec=self._spec,
            pipe=theirs,
            other_end=ours if is_forked else None,
            forked_from=os.getpid() if is_forked else None,
            epoch=self._epoch,
            plan=plan,
            read_ahead=read_ahead,
            handled_signals=handled,
        )
        # Not a daemon: daemons may have no children. It ends with the training process all the same.
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=serve, args=(task,), name="odb-loader", daemon=False
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"the data set, or a function that was passed, cannot be sent to a process: {error}. Define it at the top of a "
                "module, or pass multiprocessing_context='fork', which sends nothing (from Python 3.14 it is not the default)"
            ) from error
        theirs.close()
        self._process, self._pipe = process, ours
        self._receiver = threading.Thread(target=self._receive, args=(ours, process), name="odb-receive", daemon=True)
        self._receiver.start()

    def _call(self, method: Callable[Concatenate[LoaderServer, P], None], *args: P.args, **options: P.kwargs) -> None:
        """Asks the process to call a method of its own; does not wait."""
        pipe = self._pipe
        if pipe is not None:
            send(pipe, methodcaller(method.__name__, *args, **options))

    def read(self, count: int, held: tuple[int, ...] | None = None, end: int | None = None) -> None:
        """Asks for samples."""
        self._call(LoaderServer.read, count, held if self._spec.window_bytes is not None else None, end)

    def draw(self, items: Sequence[tuple[int, object]], count: int, *, is_last: bool) -> None:
        """Asks for samples that were drawn."""
        self._call(LoaderServer.draw, items, count, is_last=is_last)

    def collate(self, requests: tuple[BatchRequest, ...]) -> None:
        """Asks for batches."""
        self._call(LoaderServer.collate, requests)

    def describe(self) -> str:
        """Returns what the loader process is doing, by the last it has said."""
        silence = self._silence
        if silence is not None and silence.seconds > QUIET_S:
            return f"waiting for its loader process, which {silence.describe()}"
        return self._doing

    def work(self, steps: int, is_enough: Callable[[], bool] | None = None) -> None:
        """Does nothing: the process does the work."""

    def stop(self) -> None:
        """Asks for no more."""
        self._call(LoaderServer.stop)

    def end(self) -> None:
        """Ends the epoch, and the process unless its workers persist."""
        self._listener = None
        if self._is_persistent and not self._is_spoilt:
            self._call(LoaderServer.end)
        else:
            self.close()

    def close(self) -> None:
        """Ends the process and its workers."""
        self._listener = None
        process, pipe, receiver = self._process, self._pipe, self._receiver
        if pipe is not None:
            send(pipe, None)
        self._process = self._pipe = self._receiver = None
        # Two threads that wait for one process may both miss that it has ended: first the receiver, then this one.
        if process is not None and not wait([process.sentinel], JOIN_S):
            _kill(process)
        if receiver is not None:
            receiver.join(JOIN_S)
        if process is not None:
            process.join(JOIN_S)
            if process.exitcode is None:  # on a busy machine; one that waits for a dead device may take for ever
                threading.Thread(target=_reap, args=(process,), name="odb-reap", daemon=True).start()
            else:  # the first may have waited for a worker that holds a copy of the sentinel: now it is off the list
                process.join()
        if pipe is not None:
            pipe.close()

    def _receive(self, pipe: Pipe, process: BaseProcess) -> None:
        # What `Connection.poll` does, at less than half the price: every step pays it.
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            # A forked one speaks at once, another must first load what it is to do, which may take any time.
            self._silence = silence = Silence(process, is_heard=self._context.get_start_method() == "fork")
            while not pipe.closed:
                try:
                    if selector.select(WATCH_S):
                        message = pipe.recv()
                        silence.end()
                        self._dispatch(message, pipe)
                        continue
                    # A killed process does not end the connection before its workers end too: they hold copies of its end.
                    if not process.is_alive() and not pipe.poll():
                        raise EOFError
                    silence.count(WATCH_S)
                    if silence.seconds >= self._silence_s:
                        cause = f"the loader process {silence.describe()}"
                        _kill(process)
                        self._lose(cause, TimeoutError(cause), pipe)
                except (EOFError, ConnectionResetError) as error:
                    if self._listener is not None:
                        process.join(1.0)
                    cause = f"the loader process exited unexpectedly (exit code {process.exitcode})"
                    is_script = process.exitcode == 1 and not silence.is_heard  # an exception before anything else
                    self._lose(cause + _UNHEARD * is_script, error, pipe)
                    return
                except BaseException as error:  # a batch that cannot be rebuilt here
                    self._lose(describe(error), error, pipe)

    def _lose(self, cause: str, error: BaseException, pipe: Pipe) -> None:
        with self._lock:
            if pipe is not self._pipe:
                return  # it was given up, and the next may be at work: on a busy machine, who receives learns of it late
            self._is_spoilt = True
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_error(cause, error)

    def _dispatch(self, message: Message, pipe: Pipe) -> None:
        listener = self._listener
        match message:
            case str():
                self._doing = message
            case Notice(epoch) | Failure(epoch) if listener is None or epoch != self._epoch:
                pass  # that one is over
            case Notice(_, call):
                call(listener)
            case Failure(_, cause, text):
                self._lose(cause, LoaderProcessError(text), pipe)


def send(pipe: Pipe, request: methodcaller | None) -> None:
    """Sends a request, unless the process is gone, as the receiver says, or another thread closes the pipe meanwhile."""
    with contextlib.suppress(OSError):
        try:
            pipe.send(request)
        except TypeError:
            # `Connection.send` looks whether it is closed, then pickles, then writes to a descriptor that may be None by now.
            if not pipe.closed:
                raise


def _list_handled_signals() -> tuple[int, ...]:
    """Returns the signals that have a handler of Python's in this process."""
    return tuple(number for number in signal.valid_signals() if callable(signal.getsignal(number)))


def _digest(spec: PipelineSpec) -> bytes:
    """Returns a digest of all that a new process would be sent: the data set and the functions, as they are now.

    Never the same twice where it cannot be told: what holds a lock or a shared value can be sent to a new process only.
    """
    try:
        content = pickle.dumps(spec, protocol=5)
    except Exception:  # whatever pickling raises
        content = os.urandom(16)
    return hashlib.blake2b(content, digest_size=16).digest()


def _reap(process: BaseProcess) -> None:
    """Waits until a process has ended, and takes it off the list of children, which holds two descriptors for each.

    Where the receiver was told of the end first, the operating system has nothing more to say to a thread that waits for it;
    where the user ignores SIGCHLD, to none.
    """
    while process.exitcode is None:
        process.join(WATCH_S)
        if wait([process.sentinel], 0) and process.exitcode is None:
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                return
            time.sleep(WATCH_S)
    process.join()


def _kill(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        kill_with_children(process.pid)
