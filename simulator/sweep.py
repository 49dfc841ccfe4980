"""Grids of simulations, run in parallel through the `concurrent.futures` interface.

`run_grid` takes any `concurrent.futures.Executor`: the process pool of this machine, `Local` for none at all, a Dask or Ray
cluster's (`simulator.clusters`), ``mpi4py.futures.MPIPoolExecutor()`` and others of that interface. The answers come in the
order of the grid and are the same whatever runs them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from multiprocessing import active_children, get_context
from threading import current_thread, main_thread
from types import TracebackType
from typing import ParamSpec, TypeVar

from odb_ref.core.errors import InvariantError, OdbError, UsageError
from simulator.conditions import STEADY, Conditions
from simulator.costs import Costs
from simulator.lengths import Lengths
from simulator.metrics import Summary
from simulator.runs import Run, has_window, run
from simulator.workload import Sharding, Workload, build_workload

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One simulation of a grid: what differs between them."""

    policy: str
    ranks: int
    budget_tokens: int
    window_samples: int
    depth_steps: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Many simulations of the same data: what they share, and the points in order.

    Raises: UsageError when a point makes no sense, before any is run.
    """

    lengths: Lengths
    points: tuple[Point, ...]
    samples: int | None = None
    seed: int = 0
    sharding: Sharding = Sharding.EVEN
    costs: Costs = field(default_factory=Costs)
    conditions: Conditions = STEADY

    def __post_init__(self) -> None:
        for ranks in dict.fromkeys(point.ranks for point in self.points):
            workload = self.build_workload(ranks)
            for point in self.points:
                if point.ranks == ranks:
                    self.build_run(point, workload)

    def build_workload(self, ranks: int) -> Workload:
        """What ``ranks`` ranks read.

        Raises: UsageError when there are more ranks than samples.
        """
        return build_workload(self.lengths, ranks=ranks, sharding=self.sharding, samples=self.samples, seed=self.seed)

    def build_run(self, point: Point, workload: Workload) -> Run:
        """The simulation of ``point``.

        Raises: UsageError when it makes no sense.
        """
        return Run(
            workload=workload,
            policy=point.policy,
            budget_tokens=point.budget_tokens,
            window_samples=point.window_samples,
            depth_steps=point.depth_steps,
            sharding=self.sharding,
            seed=self.seed,
            costs=self.costs,
            conditions=self.conditions,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a point."""

    point: Point
    summary: Summary
    first_step_s: float
    """Simulated seconds from the start until a rank has its first step, mean over ranks."""

    def to_json(self) -> dict[str, str | int | float | None]:
        """The figures, without the one that depends on the machine: the same grid gives the same bytes."""
        figures = self.summary.to_json() | {"first_step_s": self.first_step_s}
        del figures["wall_time_s"]
        return figures


def build_points(
    *,
    policies: Sequence[str],
    ranks: Sequence[int],
    budgets: Sequence[int],
    windows: Sequence[int],
    depths: Sequence[int],
) -> tuple[Point, ...]:
    """Every combination, in the order given, ranks first. A policy without a window gets the first one only."""
    return tuple(
        Point(policy=policy, ranks=rank, budget_tokens=budget, window_samples=window, depth_steps=depth)
        for rank, budget, policy, window, depth in product(ranks, budgets, policies, windows, depths)
        if has_window(policy) or window == windows[0]
    )


class Local(Executor):
    """Runs everything at once, in this process: for one worker, and for tests."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A future that is done already."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except OdbError as error:
            future.set_exception(error)
        return future


def make_executor(workers: int) -> Executor:
    """So many processes of this machine; for one, this process.

    Raises: UsageError when there is less than one.
    """
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    if workers == 1:
        return Local()
    return ProcessPoolExecutor(workers) if sys.platform == "win32" else _Pool(workers)


class _Pool(ProcessPoolExecutor):
    """Processes that Ctrl-C ends without a word, even while they start: who asked for them says what is to be said."""

    def __init__(self, workers: int) -> None:
        self._others = set(active_children())
        # Not forked: a progress bar has a thread, and what a fork makes of its locks is luck.
        super().__init__(workers, mp_context=get_context("spawn"), initializer=_end_quietly)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A future of a process, which is started here where there are too few; it inherits that the signal is held back."""
        with _hold_back():
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Also ends what has not heard of the signal: a process that starts while others die is not missed by a broken pool."""
        if isinstance(error, KeyboardInterrupt):
            for process in set(active_children()) - self._others:
                process.terminate()
        return super().__exit__(kind, error, traceback)


@contextmanager
def _hold_back() -> Iterator[None]:
    """Ctrl-C comes when this is done: blocked for processes that are started here, and put off by a handler in this one,
    since another thread that does not block it would have it raised here all the same."""
    heard: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    is_handled = callable(handler) and current_thread() is main_thread()
    if is_handled:
        signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_handled:
            signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _end_quietly() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def simulate_point(grid: Grid, point: Point) -> Answer:
    """The answer of one point: what a worker of the executor runs.

    Raises: InvariantError, naming the point, when a property of the protocol does not hold.
    """
    try:
        result = run(grid.build_run(point, grid.build_workload(point.ranks)))
    except InvariantError as error:
        raise InvariantError(error.invariant, f"{point}: {error.detail}") from None
    first_step_s = result.rows[0].data_wait_s / point.ranks if result.rows else 0.0
    return Answer(point, result.summary, first_step_s)


def run_grid(grid: Grid, executor: Executor, on_done: Callable[[int], None] | None = None) -> list[Answer]:
    """The answers of all points, in the order of the grid. ``on_done`` hears how many are done.

    Raises: what the first point to fail raises; those that have not begun are given up.
    """
    done = count(1)

    def report(_: Future[Answer]) -> None:
        if on_done is not None:
            on_done(next(done))

    futures: list[Future[Answer]] = []
    try:
        for point in grid.points:
            future = executor.submit(simulate_point, grid, point)
            futures.append(future)
            future.add_done_callback(report)
        for future in as_completed(futures):
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
