"""What outlives an epoch of a loader: its exchange, its engine, and the epoch that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.torch.channel import Channel
from odb_ref.torch.driver import Driver
from odb_ref.torch.engine import Engine
from odb_ref.torch.epoch import make_empty_start
from odb_ref.torch.info import TABLE
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
        self._engine: Engine | None = None
        self._driver: Driver | None = None
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

    def get_engine(self, make: Callable[[], Engine]) -> Engine:
        """The engine, made at first use."""
        if self._engine is None:
            self._engine = make()
        return self._engine

    def begin(self, driver: Driver) -> None:
        """Starts an epoch. The one before must have ended: see `end_epoch`."""
        self._driver = driver
        driver.begin()

    def refuse(self, config: Config, engine: Engine, channel: Channel, error: Exception) -> None:
        """Has an epoch that cannot begin on this rank fail on all of them. Spec: R7.2. Preserves: ABORT."""
        self._driver = driver = Driver(config, engine, channel, make_empty_start())
        driver.refuse(error)

    def end_epoch(self, timeout_s: float) -> None:
        """Ends the epoch that is under way, if any, and waits until all ranks know."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.retire(timeout_s)
            TABLE.drop(driver)

    def close(self) -> None:
        """Ends everything: leaves the epoch, takes leave of the other ranks, ends workers."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            channel, engine = self._channel, self._engine
            self.end_epoch(LEAVE_S)
            if channel is not None:
                channel.close()
            if engine is not None:
                engine.close()
            if channel is not None:
                channel.join(LEAVE_S)

    def retire(self) -> None:
        """Has `close` done soon, at the latest before the next loader starts. Safe in a finalizer."""
        _closing.append(self)
        REAPER.submit(self.close)
