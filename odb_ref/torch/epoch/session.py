"""The parts of a loader that outlive an epoch, exchange and sample service, and the current epoch.

A loader or an iterator may be dropped without closing, in any thread at any time, even while that thread holds a lock. So
nothing is closed on the spot: one thread (`Cleanup`) does all the work. What is still open when the process ends is closed too.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.torch.epoch.delivery import Delivery
from odb_ref.torch.exchange.exchange_thread import Exchange
from odb_ref.torch.reading.service import SampleService

REPLACED: Final = (
    "another iteration over its loader has begun, and a loader runs one epoch at a time (for two at once, as in nested loops, "
    "make two loaders)"
)
LOADED: Final = "load_state_dict was called, so the next iteration over its loader continues from that state"
END_S: Final = 5.0
"""How long the end of the process waits for the clean-up."""
LEAVE_S: Final = 2.0
"""How long closing waits until the other ranks know of it."""

logger: Final = logging.getLogger("odb_ref")

_closing: list[Session] = []
"""Sessions that may still be closing. A new exchange first closes them, so that exchanges come and go in one order."""


class Session:
    """The moving parts of one loader. `ODBDataLoader` owns them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.exchange: Exchange | None = None
        """The exchange, once it is set up."""
        self._service: SampleService | None = None
        self._delivery: Delivery | None = None
        self._is_closed = False
        self._pid = 0
        """The process that owns the moving parts, or 0 before there are any."""

    @property
    def _is_inherited(self) -> bool:
        """True in a child forked from the owner: the parts are not the child's, and their threads did not survive the fork."""
        return self._pid not in (0, os.getpid())

    def get_exchange(self, make: Callable[[], Exchange]) -> Exchange:
        """Returns the exchange, creating it at first use.

        Raises: UsageError when the loader is closed or belongs to another process, and what ``make`` raises.
        """
        if self._is_inherited:
            raise UsageError(
                f"this loader belongs to process {self._pid}, from which this process was forked: make another loader in this "
                "process"
            )
        if self._is_closed:
            raise UsageError("this loader is closed")
        self._pid = os.getpid()
        if self.exchange is None:
            while _closing:
                _closing.pop().close()
            self.exchange = make()
            CLEANUP.watch(self)
        return self.exchange

    def get_service(self, make: Callable[[], SampleService]) -> SampleService:
        """Returns the sample service, creating it at first use."""
        if self._service is None:
            self._service = make()
        return self._service

    def begin(self, delivery: Delivery, failure: BaseException | None = None) -> None:
        """Starts an epoch. With ``failure`` the epoch fails on all ranks, because this one cannot begin it. The previous epoch
        must have ended: see `end_epoch`. Spec: R7.2. Preserves: ABORT.
        """
        self._delivery = delivery
        delivery.begin(failure)

    def end_epoch(self, timeout_s: float, lost_to: str = "") -> bool | None:
        """Ends the current epoch, if any, and waits until all ranks know. Its iterator then names ``lost_to`` as the reason.

        Returns True if its consumer was not given all of it, or it could not begin; None if there is none.
        """
        if self._is_inherited:
            return None
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return None
        delivery.leave_and_close(timeout_s, lost_to)
        return not delivery.has_given_all

    def close(self) -> None:
        """Closes everything: leaves the epoch, tells the other ranks, ends workers. Does nothing in a forked child."""
        if self._is_inherited:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            exchange, service = self.exchange, self._service
            self.end_epoch(LEAVE_S, "its loader was closed")
            if exchange is not None:
                exchange.close()
            if service is not None:
                service.close()
            if exchange is not None:
                exchange.join(1.0)

    def close_soon(self) -> None:
        """Schedules `close` to run soon, at the latest before the next loader starts. Safe in a finalizer."""
        _closing.append(self)
        CLEANUP.submit(self.close)


class Cleanup:
    """Runs the clean-up work of one process. Its thread starts with the first loader."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread()
        self._lock = threading.Lock()
        self._pid = 0
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()

    def watch(self, item: Session) -> None:
        """Closes ``item`` before the process ends, if it still exists then."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._open = weakref.WeakSet()
                self._tasks = queue.SimpleQueue()
                self._thread = threading.Thread(target=self._run, name="odb-cleanup", daemon=True)
                self._thread.start()
                # Runs before multiprocessing waits for child processes, both in the main process and in children.
                multiprocessing.util.Finalize(None, self._close_all, exitpriority=100)
            self._open.add(item)

    def submit(self, task: Callable[[], None]) -> None:
        """Queues ``task`` to run soon. Safe in a finalizer; does nothing in a forked child."""
        if self._pid == os.getpid():
            self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # the remaining tasks must still run
                logger.exception("part of a loader could not be closed")
            del task

    def _close_all(self) -> None:
        if self._pid == os.getpid():
            with ExitStack() as stack:  # closes every item, whatever one of them raises
                # A thread that frees a tensor while Python ends aborts the process.
                stack.callback(self._thread.join, END_S)
                stack.callback(self._tasks.put, None)
                for item in list(self._open):
                    stack.callback(item.close)


CLEANUP = Cleanup()
