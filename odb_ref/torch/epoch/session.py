"""The parts of a loader that outlive an epoch, exchange and sample service, and the current epoch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.torch.epoch.cleanup import CLEANUP
from odb_ref.torch.epoch.delivery import Delivery
from odb_ref.torch.exchange.exchange_thread import Exchange
from odb_ref.torch.reading.service import SampleService

REPLACED: Final = (
    "another iteration over its loader has begun, and a loader runs one epoch at a time (for two at once, as in nested loops, "
    "make two loaders)"
)
LOADED: Final = "load_state_dict was called, so the next iteration over its loader continues from that state"
LEAVE_S: Final = 2.0
"""How long closing waits until the other ranks know of it."""

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

    def end_epoch(self, timeout_s: float, lost_to: str = "") -> None:
        """Ends the current epoch, if any, and waits until all ranks know. Its iterator then names ``lost_to`` as the reason."""
        if self._is_inherited:
            return
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.leave_and_close(timeout_s, lost_to)

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
