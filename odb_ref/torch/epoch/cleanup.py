"""Closes loaders and iterators that were dropped without closing, and whatever is still open when the process ends.

An object may be dropped in any thread at any time, even while that thread holds a lock. So nothing is closed on the spot: one
thread does all the work.
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
"""How long the end of the process waits for this work."""


class Closable(Protocol):
    """An object that is closed before the process ends."""

    def close(self) -> None:
        """Closes everything; may wait a little."""


class Cleanup:
    """Runs the clean-up work of one process. Its thread starts with the first loader."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread()
        self._lock = threading.Lock()
        self._pid = 0
        self._open: weakref.WeakSet[Closable] = weakref.WeakSet()

    def watch(self, item: Closable) -> None:
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
