"""Tidies up after loaders and iterators that were dropped instead of closed, and before the process ends.

An object may be dropped in any thread and at any moment, even while that thread holds a lock, so nothing is done there and
then: the work is handed to one thread that does it.
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
from typing import Final, Protocol

logger: Final = logging.getLogger("odb_ref")

END_S: Final = 5.0
"""How long the end of the process waits for what is still being tidied up."""


class Closable(Protocol):
    """What is closed before the process ends."""

    def close(self) -> None:
        """Closes everything; may wait a little."""
        ...


class Cleanup:
    """One per process; its thread starts with the first loader."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread()
        self._lock = threading.Lock()
        self._pid = 0
        self._open: weakref.WeakSet[Closable] = weakref.WeakSet()

    def watch(self, item: Closable) -> None:
        """Closes ``item`` before the process ends, if it is still there then."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._open = weakref.WeakSet()
                self._tasks = queue.SimpleQueue()
                self._thread = threading.Thread(target=self._run, name="odb-cleanup", daemon=True)
                self._thread.start()
                # Runs before multiprocessing waits for child processes, in main and in child processes.
                multiprocessing.util.Finalize(None, self._close_all, exitpriority=100)
            self._open.add(item)

    def submit(self, task: Callable[[], None]) -> None:
        """Has ``task`` done soon. Safe in a finalizer; does nothing in a forked child."""
        if self._pid == os.getpid():
            self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # the others' turn comes all the same
                logger.exception("not all of a loader could be closed")
            del task

    def _close_all(self) -> None:
        if self._pid == os.getpid():
            with ExitStack() as stack:  # all of it is done, whatever one of them raises
                # A thread that frees a tensor while Python ends aborts the process.
                stack.callback(self._thread.join, END_S)
                stack.callback(self._tasks.put, None)
                for item in list(self._open):
                    stack.callback(item.close)


CLEANUP = Cleanup()
