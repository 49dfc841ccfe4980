"""What is reported of reading and collating, to whom, and until when."""

from __future__ import annotations

import threading
from typing import Final, Protocol

END_S: Final = 0.5
"""How long the end of an epoch waits for a thread in the user's code, which may never come back: a mount is gone, say."""

ReadItem = tuple[int, int, int, tuple[int, ...]]
"""A sample as the machine sees it: its place in the sampler's order, length, supervised tokens and further costs."""


class PipelineListener(Protocol):
    """Whom a pipeline reports to; called from its threads."""

    def on_read(self, items: list[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        """Answers one ``read``: as many items as asked for, fewer only at the end, or when the window is full."""
        ...

    def on_doubt(self, text: str) -> None:
        """Something about the data or a function is probably not what the user means: to be warned of."""
        ...

    def on_bad(self, place: int, cause: str) -> None:
        """A sample was set aside; comes before the samples that lie behind it."""
        ...

    def on_batch(self, number: int, batch: object) -> None:
        """The batch of a step is made; those of a round come in any order."""
        ...

    def on_collated(self, round_: int) -> None:
        """Answers one ``collate``: all its batches are made."""
        ...

    def on_error(self, cause: str, error: BaseException) -> None:
        """Reading or collating failed, as ``cause`` says in a line; nothing more comes."""
        ...


class Gate:
    """Passes on what a thread reports, until it is closed: that thread may still be in the user's code."""

    def __init__(self, listener: PipelineListener) -> None:
        self._listener = listener
        self._lock = threading.RLock()
        self._is_open = True

    def close(self) -> None:
        """Stops passing anything on: nothing follows once it has returned."""
        if self._lock.acquire(timeout=END_S):
            self._lock.release()
        self._is_open = False

    def on_read(self, items: list[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        """Passes samples on."""
        with self._lock:
            if self._is_open:
                self._listener.on_read(items, is_ended=is_ended, is_full=is_full)

    def on_bad(self, place: int, cause: str) -> None:
        """Passes a sample set aside on."""
        with self._lock:
            if self._is_open:
                self._listener.on_bad(place, cause)

    def on_doubt(self, text: str) -> None:
        """Passes a warning on."""
        with self._lock:
            if self._is_open:
                self._listener.on_doubt(text)

    def on_batch(self, number: int, batch: object) -> None:
        """Passes a batch on."""
        with self._lock:
            if self._is_open:
                self._listener.on_batch(number, batch)

    def on_collated(self, round_: int) -> None:
        """Passes on that a round is made."""
        with self._lock:
            if self._is_open:
                self._listener.on_collated(round_)

    def on_error(self, cause: str, error: BaseException) -> None:
        """Passes a failure on."""
        with self._lock:
            if self._is_open:
                self._listener.on_error(cause, error)
