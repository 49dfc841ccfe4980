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
from dataclasses import dataclass, field
from typing import Final

from odb_ref.torch.exchange.identity import LoaderIdentity

NOTICE_S: Final = 1.0
"""A thread that waits for less is not called blocked."""


@dataclass(slots=True, eq=False)
class Wait:
    """A thread of this process that waits in a loader for other ranks."""

    identity: LoaderIdentity
    find_awaited: Callable[[], int]
    """The rank of the job that it waits for; -1 for none."""
    end: Callable[[int, str], None]
    """Ends the wait with an error: for the rank of the job that is elsewhere (-1: unknown), and the cause."""
    since_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has waited."""
        return time.monotonic() - self.since_s


_waits: Final[list[Wait]] = []
_lock: Final = threading.Lock()


@contextlib.contextmanager
def blocked(wait: Wait) -> Iterator[Wait]:
    """Lists the wait while the body runs."""
    with _lock:
        _waits.append(wait)
    try:
        yield wait
    finally:
        with _lock:
            _waits.remove(wait)


def find_other(identity: LoaderIdentity) -> tuple[str, int]:
    """Returns the loader that this process is blocked in, and the rank of the job that it waits for there, if it is another."""
    with _lock:
        others = [wait for wait in _waits if wait.identity != identity and wait.seconds >= NOTICE_S]
    for wait in others:
        with contextlib.suppress(RuntimeError):  # the store is gone
            if (awaited := wait.find_awaited()) >= 0:
                return str(wait.identity), awaited
    return "", -1


def end_all(rank: int, cause: str) -> None:
    """Ends whatever this process waits in: ``rank`` of the job is in another loader."""
    with _lock:
        waits = list(_waits)
    for wait in waits:
        wait.end(rank, cause)
