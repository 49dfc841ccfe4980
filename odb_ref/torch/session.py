"""What outlives an epoch of a loader: its exchange, its backend, and the epoch that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.torch.channel import Channel
from odb_ref.torch.epoch import Backend
from odb_ref.torch.info import TABLE
from odb_ref.torch.outlet import Outlet
from odb_ref.torch.reaper import REAPER

LEAVE_S: Final = 5.0
"""How long closing waits for the other ranks to take note."""

_closing: list[Session] = []
"""Sessions that may still be taking leave: a new process group waits for them, so that groups come and go in one order."""


class Session:
    """The moving parts of one loader; `ODBDataLoader` is their owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._backend: Backend | None = None
        self._outlet: Outlet | None = None
        self._is_closed = False

    @property
    def channel(self) -> Channel | None:
        """The exchange, once it is set up."""
        return self._channel

    def get_channel(self, make: Callable[[], Channel]) -> Channel:
        """The exchange, made at first use.

        Raises: UsageError when the loader is closed, and what ``make`` raises.
        """
        if self._is_closed:
            raise UsageError("this loader is closed")
        if self._channel is None:
            while _closing:
                _closing.pop().close()
            self._channel = make()
            REAPER.watch(self)
        return self._channel

    def get_backend(self, make: Callable[[], Backend]) -> Backend:
        """Where samples are read, made at first use."""
        if self._backend is None:
            self._backend = make()
        return self._backend

    def begin(self, outlet: Outlet) -> None:
        """Starts an epoch. The one before must have ended: see `end_epoch`."""
        self._outlet = outlet
        outlet.begin()

    def refuse(self, outlet: Outlet, error: Exception) -> None:
        """Has an epoch that cannot begin on this rank fail on all of them. Spec: R7.2. Preserves: ABORT."""
        self._outlet = outlet
        outlet.refuse(error)

    def end_epoch(self, timeout_s: float) -> None:
        """Ends the epoch that is under way, if any, and waits until all ranks know."""
        outlet, self._outlet = self._outlet, None
        if outlet is not None:
            outlet.retire(timeout_s)
            TABLE.drop(outlet)

    def close(self) -> None:
        """Ends everything: leaves the epoch, takes leave of the other ranks, ends workers."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            channel, backend = self._channel, self._backend
            self.end_epoch(LEAVE_S)
            if channel is not None:
                channel.close()
            if backend is not None:
                backend.close()
            if channel is not None:
                channel.join(LEAVE_S)

    def retire(self) -> None:
        """Has `close` done soon, at the latest before the next loader starts. Safe in a finalizer."""
        _closing.append(self)
        REAPER.submit(self.close)
