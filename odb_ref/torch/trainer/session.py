"""What outlives an epoch of a loader: its exchange, its backend, and the epoch that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.torch.backend.messages import Backend
from odb_ref.torch.exchange.exchange import Exchange
from odb_ref.torch.trainer.cleanup import CLEANUP
from odb_ref.torch.trainer.trainer_side import TrainerSide

REPLACED: Final = (
    "another iteration over its loader has begun, and a loader has one epoch at a time (for two at once, as in zip or nested "
    "loops, make two loaders)"
)
LEAVE_S: Final = 2.0
"""How long closing waits for the other ranks to learn of it."""

_closing: list[Session] = []
"""Sessions that may still be taking leave: a new process group waits for them, so that groups come and go in one order."""


class Session:
    """The moving parts of one loader; `ODBDataLoader` is their owner. ``forget`` is told of each epoch that has ended."""

    def __init__(self, forget: Callable[[TrainerSide], None]) -> None:
        self._forget = forget
        self._lock = threading.Lock()
        self._exchange: Exchange | None = None
        self._backend: Backend | None = None
        self._trainer_side: TrainerSide | None = None
        self._is_closed = False

    @property
    def exchange(self) -> Exchange | None:
        """The exchange, once it is set up."""
        return self._exchange

    def get_exchange(self, make: Callable[[], Exchange]) -> Exchange:
        """Returns the exchange, made at first use.

        Raises: UsageError when the loader is closed, and what ``make`` raises.
        """
        if self._is_closed:
            raise UsageError("this loader is closed")
        if self._exchange is None:
            while _closing:
                _closing.pop().close()
            self._exchange = make()
            CLEANUP.watch(self)
        return self._exchange

    def get_backend(self, make: Callable[[], Backend]) -> Backend:
        """Returns where samples are read, made at first use."""
        if self._backend is None:
            self._backend = make()
        return self._backend

    def begin(self, trainer_side: TrainerSide) -> None:
        """Starts an epoch. The one before must have ended: see `end_epoch`."""
        self._trainer_side = trainer_side
        trainer_side.begin()

    def refuse(self, trainer_side: TrainerSide, error: BaseException) -> None:
        """Has an epoch that cannot begin on this rank fail on all of them. Spec: R7.2. Preserves: ABORT."""
        self._trainer_side = trainer_side
        trainer_side.refuse(error)

    def end_epoch(self, timeout_s: float, lost_to: str = "") -> None:
        """Ends the epoch that is under way, if any, and waits until all ranks know. ``lost_to`` is for its iterator to say."""
        trainer_side, self._trainer_side = self._trainer_side, None
        if trainer_side is not None:
            trainer_side.leave_and_close(timeout_s, lost_to)
            self._forget(trainer_side)

    def close(self) -> None:
        """Ends everything: leaves the epoch, takes leave of the other ranks, ends workers."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            exchange, backend = self._exchange, self._backend
            self.end_epoch(LEAVE_S, "its loader was closed")
            if exchange is not None:
                exchange.close()
            if backend is not None:
                backend.close()
            if exchange is not None:
                exchange.join(1.0)

    def close_soon(self) -> None:
        """Has `close` done soon, at the latest before the next loader starts. Safe in a finalizer."""
        _closing.append(self)
        CLEANUP.submit(self.close)
