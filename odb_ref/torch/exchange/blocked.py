"""What the threads of this process are blocked in, so that ranks in different loaders do not wait for each other for ever.

Rank 0 is blocked in loader A, for rank 1 has not begun it; rank 1 in loader B, for rank 0 has not begun that. Each says in its
heartbeats, as the rank that A or B waits for, where it is blocked itself and for which rank of the job: so each finds out. The
first that does ends both exchanges, everywhere. Spec: R18.2.
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
"""A thread that waits for less is not called blocked."""


@dataclass(slots=True, eq=False)
class Wait:
    """Where threads of this process wait for other ranks: a loader, while it exchanges with them or is about to."""

    identity: LoaderIdentity
    find_awaited: Callable[[], int]
    """The rank of the job that it waits for; -1 for none."""
    end: Callable[[int, str], None]
    """Ends the wait with an error: for the rank of the job that is elsewhere (-1: unknown), and the cause."""
    since_s: float | None = None
    """Since when a thread waits; None while none does."""

    @property
    def seconds(self) -> float:
        """How long a thread has waited."""
        return 0.0 if (since_s := self.since_s) is None else time.monotonic() - since_s


_waits: Final[list[Wait]] = []
_lock: Final = threading.Lock()


def add(wait: Wait) -> None:
    """Lists the wait."""
    with _lock:
        _waits.append(wait)


def remove(wait: Wait) -> None:
    """Takes the wait off the list, if it is there."""
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


def find_other(identity: LoaderIdentity) -> tuple[str, int]:
    """Returns the loader that this process is blocked in, and the rank of the job that it waits for there, if it is another."""
    with _lock:
        others = [wait for wait in _waits if wait.identity != identity and wait.seconds >= NOTICE_S]
    for wait in others:
        with contextlib.suppress(RuntimeError):  # the store is gone
            if (awaited := wait.find_awaited()) >= 0:
                return str(wait.identity), awaited
    return "", -1


def end_all(rank: int, cause: str, loader: str = "") -> None:
    """Ends whatever this process waits in, and ``loader``, in which ``rank`` of the job waits for this process.

    That one too from here: else the other rank, before it hears the cause, may hear that this process has closed it.
    """
    with _lock:
        waits = [wait for wait in _waits if wait.since_s is not None or str(wait.identity) == loader]
    for wait in waits:
        wait.end(rank, cause)
