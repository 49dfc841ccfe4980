"""A store of torch.distributed whose calls end.

The store's own timeout bounds only a wait for a key. If the network to its host drops everything, any other call waits until
the operating system gives up the connection, on Linux after a quarter of an hour.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

LEAST_S: Final = 2.0
"""How long a call may take after the deadline, so that there is time for last words."""


class StoreError(Exception):
    """The store has not answered, or its connection is gone."""


class BoundedStore:
    """Calls a store until ``timeout_s`` from now. After a call that has not ended in time, all others fail at once.

    Raises: StoreError from each call that fails.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._deadline = time.monotonic() + timeout_s
        self._is_stuck = False

    def check(self, *keys: str) -> bool:
        """Returns whether all of the keys exist."""
        return self._call(lambda: self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """Returns the value of a key that exists."""
        return self._call(lambda: self._store.get(key))

    def set(self, key: str, value: str) -> None:
        """Sets the value of a key."""
        self._call(lambda: self._store.set(key, value))

    def compare_set(self, key: str, before: str, value: str) -> None:
        """Sets the value of a key if it is still ``before``; empty means that there is no such key."""
        self._call(lambda: self._store.compare_set(key, before, value))

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._call(lambda: self._store.delete_key(key))

    def _call(self, function: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        if not self._is_stuck:
            # Nothing ends such a call, so it gets a thread of its own, which does not hold up the end of the process.
            threading.Thread(target=_answer, args=(answer, function), name="odb-store", daemon=True).start()
            wait((answer,), max(LEAST_S, self._deadline - time.monotonic()))
        self._is_stuck = self._is_stuck or not answer.done()
        if self._is_stuck:
            raise StoreError("the store has not answered")
        try:
            return answer.result()
        except RuntimeError as error:
            raise StoreError(str(error)) from error


def _answer(answer: Future[T], function: Callable[[], T]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)
