"""A queue without a thread of its own: whichever thread adds an item handles it, and those that come meanwhile.

So items are handled one after another, and no thread ever waits for another to take its item.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Hands each item to ``handle``. Opens with the first item, and keeps those that come before it."""

    def __init__(self, handle: Callable[[Item], None], on_error: Callable[[Exception], None]) -> None:
        self._handle = handle
        self._on_error = on_error
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._is_open = False
        self._is_handling = False

    def open(self, first: Item | None = None) -> bool:
        """Handles ``first``, and then what came before it. Returns False, and does nothing, when it is open."""
        with self._lock:
            if self._is_open:
                return False
            self._is_open = True
            if first is None:
                return True
            self._is_handling = True
            self._items.appendleft(first)
        self._handle_all()
        return True

    @property
    def is_open(self) -> bool:
        """True once it handles items."""
        return self._is_open

    def add(self, item: Item, *, is_first: bool = False) -> None:
        """Handles an item after those that came before it, or with ``is_first`` before those that wait."""
        with self._lock:
            if is_first:
                self._items.appendleft(item)
            else:
                self._items.append(item)
            if self._is_handling or not self._is_open:
                return
            self._is_handling = True
        self._handle_all()

    def _handle_all(self) -> None:
        """Handles what waits, until nothing does: for the one thread that has set ``_is_handling``."""
        try:
            while True:
                with self._lock:
                    if not self._items:
                        self._is_handling = False
                        return
                    item = self._items.popleft()
                self._handle(item)
        except Exception as error:
            self._on_error(error)  # what comes from now on is kept, and never handled
