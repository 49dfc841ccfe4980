"""Tracks where threads of this process are blocked, so that ranks in different loaders do not wait for each other for ever.

Say rank 0 is blocked in loader A, because rank 1 has not begun it, and rank 1 is blocked in loader B, because rank 0 has not
begun that. When A or B waits for a rank, this rank reports in its heartbeats where it is blocked and for which rank of the job
it waits. So each finds out, and the first that does ends both exchanges, everywhere. Spec: R18.2.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from odb_ref.torch.exchange.identity import LoaderIdentity

NOTICE_S: Final = 1.0
"""A thread counts as blocked after waiting this long."""


@dataclass(slots=True, eq=False)
class Wait:
    """A loader in which threads of this process may wait for other ranks, while it exchanges with them or is about to."""

    identity: LoaderIdentity
    find_awaited: Callable[[], int]
    """Returns the rank of the job that the loader waits for, or -1. Does not wait itself."""
    end: Callable[[int, str], None]
    """Ends the wait with an error. Takes the rank of the job that is in another loader (-1 if unknown), and the cause."""
    since_s: float | None = None
    """When the wait began, or None while no thread waits."""

    @property
    def seconds(self) -> float:
        """How long a thread has waited."""
        return 0.0 if (since_s := self.since_s) is None else time.monotonic() - since_s


_waits: Final[list[Wait]] = []
_lock: Final = threading.Lock()


def add(wait: Wait) -> None:
    """Adds the wait to the list."""
    with _lock:
        _waits.append(wait)


def remove(wait: Wait) -> None:
    """Removes the wait from the list, if it is there."""
    with _lock, contextlib.suppress(ValueError):
        _waits.remove(wait)


@contextlib.contextmanager
def blocked(wait: Wait) -> Iterator[None]:
    """Lists the wait while the body runs."""
    wait.since_s = time.monotonic()
    add(wait)
    try:
        yield
    finally:
        remove(wait)


def has_others(identity: LoaderIdentity) -> bool:
    """Returns whether other loaders of this process exchange, or wait to begin: they send what `find_other` returns."""
    with _lock:
        return any(wait.identity != identity for wait in _waits)


def find_other(identity: LoaderIdentity) -> tuple[str, int]:
    """Returns another loader that this process is blocked in, and the rank of the job it waits for; empty and -1 if none."""
    with _lock:
        others = [wait for wait in _waits if wait.identity != identity and wait.seconds >= NOTICE_S]
    for wait in others:
        if (awaited := wait.find_awaited()) >= 0:
            return str(wait.identity), awaited
    return "", -1


def end_all(rank: int, cause: str, loader: str = "") -> None:
    """Ends all waits of this process, and ``loader``, in which ``rank`` of the job waits for this process.

    ``loader`` must end from this side too. Otherwise the other rank might see this process close it before it learns the cause.
    """
    with _lock:
        waits = [wait for wait in _waits if wait.since_s is not None or str(wait.identity) == loader]
    for wait in waits:
        wait.end(rank, cause)
