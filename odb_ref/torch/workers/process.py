"""The sample service in a process of its own, as seen from the training process.

Reading and collating then never hold the interpreter lock of the training process. Samples never enter that process: it only
gets their lengths, and finished batches. Large tensors of a batch are in shared memory, while small ones come as bytes, because
handing over a shared-memory file takes several times as long, mostly with the interpreter lock held.
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
from odb_ref.torch.reading.description import Failure, describe, describe_exit
from odb_ref.torch.reading.pipeline import PipelineSpec
from odb_ref.torch.reading.service import BatchRequest, ReadPlan, SampleListener
from odb_ref.torch.workers.serving import (
    WATCH_S,
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
"""How long a loader process may take to end its workers before it is killed together with them."""

_UNHEARD: Final = (
    " before it began. A process that is not forked runs the main script again, so put the script's work under if __name__ == "
    "'__main__'"
)

QUIET_S: Final = 2.0
"""A loader process that has done nothing for this long counts as silent in messages."""


class LoaderProcess:
    """A loader process. It outlives the epoch if its workers do. See `odb_ref.torch.reading.service.SampleService`."""

    is_inline = False
    has_work = False

    def __init__(self, spec: PipelineSpec) -> None:
        context = spec.options.multiprocessing_context
        self._context = context if isinstance(context, BaseContext) else torch.multiprocessing.get_context(context)
        start_method = self._context.get_start_method(allow_none=False)
        wanted = spec.options.persistent_workers
        self._is_persistent = start_method != "fork" if wanted is None else wanted
        self._is_watching_changes = self._is_persistent and wanted is None
        """True if the process is replaced when the data set or functions it was sent change."""
        self._sent = b""
        """A digest of what the process was started with, if changes are watched."""
        # The loader process itself was already started with this method; its workers should be too.
        options = replace(spec.options, multiprocessing_context=start_method, persistent_workers=self._is_persistent)
        self._spec = replace(spec, options=options)
        self._silence_s = spec.options.silence_s
        self._process: BaseProcess | None = None
        self._pipe: Pipe | None = None
        self._receiver: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_spoilt = False
        """True if the process is gone or has lost a worker or anything else, so that the next epoch needs a new one."""
        self._epoch = 0
        self._doing = "starting its loader process"
        self._silence: Silence | None = None
        self._listener: SampleListener | None = None

    def begin(self, plan: ReadPlan, listener: SampleListener, read_ahead: int) -> None:
        """Starts an epoch, and the process if it is not running.

        Raises: UsageError when the data set or a function cannot be sent to a process.
        """
        digest = _digest(self._spec) if self._is_watching_changes else b""
        with self._lock:
            is_alive = self._process is not None and self._process.is_alive() and not self._is_spoilt
            is_alive = is_alive and digest == self._sent
            self._epoch += 1
            self._listener = listener if is_alive else None
        handled = tuple(number for number in signal.valid_signals() if callable(signal.getsignal(number)))
        if is_alive:
            self._call(LoaderServer.begin_epoch, self._epoch, plan, read_ahead, handled)
            return
        self.close()  # cleans up after a process that was lost in an epoch, or died between two
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
        # It is not a daemon, because daemons may have no children. It ends with the training process all the same.
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=serve, args=(task,), name="odb-loader", daemon=False
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"the data set, or a function passed to the loader, cannot be sent to another process: {error}. Define it at "
                "the top level of a module, or pass multiprocessing_context='fork', which sends nothing (from Python 3.14 it "
                "is not the default)"
            ) from error
        theirs.close()
        self._process, self._pipe = process, ours
        self._receiver = threading.Thread(target=self._receive, args=(ours, process), name="odb-receive", daemon=True)
        self._receiver.start()

    def _call(self, method: Callable[Concatenate[LoaderServer, P], None], *args: P.args, **options: P.kwargs) -> None:
        """Asks the process to call a method of its `LoaderServer`. Does not wait."""
        pipe = self._pipe
        if pipe is not None:
            send(pipe, methodcaller(method.__name__, *args, **options))

    def read(self, count: int, held: tuple[int, ...] | None = None, end: int | None = None) -> None:
        """Requests samples: see `SampleService.read`."""
        self._call(LoaderServer.read, count, held if self._spec.window_bytes is not None else None, end)

    def draw(self, items: Sequence[tuple[int, object]], count: int, *, is_last: bool) -> None:
        """Adds and requests samples that were drawn: see `SampleService.draw`."""
        self._call(LoaderServer.draw, items, count, is_last=is_last)

    def collate(self, requests: tuple[BatchRequest, ...]) -> None:
        """Requests batches."""
        self._call(LoaderServer.collate, requests)

    def describe(self) -> str:
        """Returns what the loader process last reported to be doing."""
        silence = self._silence
        if silence is not None and silence.seconds > QUIET_S:
            return f"waiting for its loader process, which {silence.describe()}"
        return self._doing

    def work(self, steps: int, is_enough: Callable[[], bool] | None = None) -> None:
        """Does nothing: the process does the work."""

    def stop(self) -> None:
        """Stops reading and collating."""
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
        # If two threads wait for one process, both may miss its end. So the receiver waits first, and then this thread.
        if process is not None and not wait([process.sentinel], JOIN_S):
            _kill(process)
        if receiver is not None:
            receiver.join(JOIN_S)
        if process is not None:
            process.join(JOIN_S)
            if process.exitcode is None:  # a busy machine, or a process that waits for a dead device, perhaps for ever
                threading.Thread(target=_reap, args=(process,), name="odb-reap", daemon=True).start()
            else:  # the join above may have waited for a worker with a copy of the sentinel: remove the process from the list
                process.join()
        if pipe is not None:
            pipe.close()

    def _receive(self, pipe: Pipe, process: BaseProcess) -> None:
        # Does the same as `Connection.poll` at less than half the cost, which every step pays.
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            # A forked process reports at once. Any other must first import modules, which may take any time.
            self._silence = silence = Silence(process, is_heard=self._context.get_start_method() == "fork")
            while not pipe.closed:
                try:
                    if selector.select(WATCH_S):
                        message = pipe.recv()
                        silence.end()
                        self._dispatch(message, pipe)
                        continue
                    # If the process is killed, its connection stays open until its workers end, because they have copies.
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
                    cause = f"the loader process {describe_exit(process.exitcode)}"
                    # It has ended by itself before it sent anything.
                    is_script = not silence.is_heard and process.exitcode is not None and process.exitcode >= 0
                    self._lose(cause + _UNHEARD * is_script, error, pipe)
                    return
                except BaseException as error:  # a batch that cannot be rebuilt in this process
                    self._lose(describe(error), error, pipe)

    def _lose(self, cause: str, error: BaseException, pipe: Pipe) -> None:
        with self._lock:
            if pipe is not self._pipe:
                return  # this process was given up, and the next may be running: on a busy machine this thread learns it late
            self._is_spoilt = True
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_error(cause, error)

    def _dispatch(self, message: Message, pipe: Pipe) -> None:
        listener = self._listener
        match message:
            case str():
                self._doing = message
            case Notice(epoch) if listener is None or epoch != self._epoch:
                pass  # that epoch is over
            case Notice(_, Failure(cause, text)) | Failure(cause, text):
                self._lose(cause, LoaderProcessError(text), pipe)
            case Notice(_, methodcaller() as call):
                call(listener)


def send(pipe: Pipe, request: methodcaller | None) -> None:
    """Sends a request. Ignores a process that is gone, which the receiver reports, and a pipe closed by another thread."""
    with contextlib.suppress(OSError):
        try:
            pipe.send(request)
        except TypeError:
            # `Connection.send` checks that it is open, then pickles, then writes to a descriptor that may be None by then.
            if not pipe.closed:
                raise


def _digest(spec: PipelineSpec) -> bytes:
    """Returns a digest of everything that a new process would be sent: the data set and the functions, as they are now.

    If the content cannot be pickled here, for example because it holds a lock, the digest is different each time.
    """
    try:
        content = pickle.dumps(spec, protocol=5)
    except Exception:  # pickling may raise anything
        content = os.urandom(16)
    return hashlib.blake2b(content, digest_size=16).digest()


def _reap(process: BaseProcess) -> None:
    """Waits until a process has ended, and removes it from the list of children, which holds two descriptors for each.

    If the receiver learned of the end first, the operating system never reports it to another waiting thread. If the user
    ignores SIGCHLD, it reports it to none.
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
