"""The side of a loader where samples are read and batches formed, in threads of this process."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

from odb_ref.core.config import Config
from odb_ref.core.events import Event
from odb_ref.torch.backend.driver import Driver
from odb_ref.torch.backend.messages import Listener
from odb_ref.torch.backend.watching import Stops
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.reading import collate_workers
from odb_ref.torch.reading.pipeline import PipelineSpec, ReadPipeline


class ThreadBackend:
    """A pipeline, and a driver for each epoch. See `odb_ref.torch.backend.messages.Backend`."""

    def __init__(self, config: Config, spec: PipelineSpec, *, is_inline: bool = False) -> None:
        self._config = config
        self.is_inline = is_inline
        """True when the consumer's thread reads and collates, by `work`."""
        self._pipeline = ReadPipeline(spec, is_inline=is_inline)
        self._budget_schedule = spec.budget_schedule
        self._stops = Stops(spec.options.silence_s)
        self._driver: Driver | None = None

    def begin(self, start: EpochStart, listener: Listener) -> None:
        """Starts an epoch."""
        self.end()
        driver = Driver(start.make_config(self._config), start, listener, self._budget_schedule)
        try:
            driver.begin(self._pipeline)
        finally:
            # Not before: workers that have died since the last epoch, and are replaced now, do not concern this one.
            self._driver = driver

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Has the machine handle an event."""
        if self._driver is not None:
            self._driver.submit(event, at_s)

    @property
    def has_work(self) -> bool:
        """True when something waits for `work`."""
        return self._pipeline.has_work

    def work(self, steps: int, limit_s: float | None = None) -> None:
        """Reads and collates in the caller's thread: see `ReadPipeline.work`."""
        self._pipeline.work(steps, limit_s)

    def check_workers(self, seconds: float = 0.0) -> bool:
        """Looks at the workers, ``seconds`` after the last time. Returns False when one has died, or was stopped for too long;
        the driver is then told. Torch itself looks every five seconds, and only for the dead.
        """
        driver = self._driver  # first: a worker of an epoch that ends meanwhile does not concern the next
        if (worker := self._pipeline.find_dead_worker()) is not None:
            _tell(driver, f"{_describe(worker)} exited unexpectedly (exit code {worker.exitcode})")
            return False
        if (stopped := self._stops.look(self._pipeline.processes, seconds)) is not None:
            worker, how = stopped
            _tell(driver, f"{_describe(worker)} {how}")
            worker.kill()  # then nobody waits for it any longer, and the next epoch begins without it
            return False
        return True

    def describe(self) -> str:
        """Returns what is being read and collated."""
        return self._pipeline.describe()

    def close_trace(self) -> None:
        """Ends the trace."""
        if self._driver is not None:
            self._driver.close_trace()

    def end(self) -> None:
        """Ends the epoch."""
        driver, self._driver = self._driver, None
        self._pipeline.end()
        if driver is not None:
            driver.close_trace()

    def close(self) -> None:
        """Ends the epoch, and the processes that outlive one."""
        self.end()
        self._pipeline.close()


def _describe(worker: BaseProcess) -> str:
    is_collating = worker.name.startswith(collate_workers.NAME)
    return f"{'the process that collates' if is_collating else 'DataLoader worker'} (pid {worker.pid})"


def _tell(driver: Driver | None, cause: str) -> None:
    if driver is not None:
        driver.on_error(cause, RuntimeError(cause))
