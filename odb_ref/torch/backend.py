"""The end of a loader where samples are read and batches formed, in threads of this process."""

from __future__ import annotations

from odb_ref.core.config import Config
from odb_ref.core.events import Event
from odb_ref.torch.driver import Driver
from odb_ref.torch.engine import Engine, EngineSpec
from odb_ref.torch.epoch import EpochStart, Listener


class ThreadBackend:
    """An engine, and a driver for each epoch. See `odb_ref.torch.epoch.Backend`."""

    def __init__(self, config: Config, spec: EngineSpec) -> None:
        self._config = config
        self._engine = Engine(spec)
        self._driver: Driver | None = None

    def begin(self, start: EpochStart, listener: Listener) -> None:
        """Starts an epoch."""
        self.end()
        self._driver = Driver(start.make_config(self._config), start, listener)
        self._driver.begin(self._engine)

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Has the machine handle an event."""
        if self._driver is not None:
            self._driver.submit(event, at_s)

    def check_workers(self) -> bool:
        """False when a worker has died; the driver is then told. Torch itself looks only every five seconds."""
        worker = self._engine.find_dead_worker()
        if worker is None:
            return True
        if self._driver is not None:
            cause = f"DataLoader worker (pid {worker.pid}) exited unexpectedly (exit code {worker.exitcode})"
            self._driver.on_error(cause, RuntimeError(cause))
        return False

    def conclude(self) -> None:
        """Ends the trace."""
        if self._driver is not None:
            self._driver.close_trace()

    def end(self) -> None:
        """Ends the epoch."""
        driver, self._driver = self._driver, None
        self._engine.end()
        if driver is not None:
            driver.close_trace()

    def close(self) -> None:
        """Ends the epoch."""
        self.end()
