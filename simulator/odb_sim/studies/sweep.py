"""Grids of simulations, run in parallel through the `concurrent.futures` interface.

`run_grid` takes any `concurrent.futures.Executor`: the process pool of this machine, `Local` for none at all, a Dask
or Ray cluster's (`odb_sim.studies.clusters`), ``mpi4py.futures.MPIPoolExecutor()`` and others of that interface. The answers
come in the order of the grid and are the same whatever runs them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from multiprocessing import active_children, get_context, parent_process
from threading import Thread, current_thread, main_thread
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

import numpy as np

from odb_ref.core.config import Terms
from odb_ref.core.errors import InvariantError, OdbError, UsageError
from odb_sim.engine.cautions import Caution
from odb_sim.engine.metrics import StepRow, Summary
from odb_sim.inputs.conditions import STEADY, Conditions
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding, Workload, build_workload
from odb_sim.studies.runs import JOIN_ALL, Run, has_window, run

FEWEST_WINDOWS: Final = 4
"""With fewer full windows the ends of an epoch are all there is of it."""

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
    samples: int | None = None
    """Drawn for this simulation; None: those of the grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The data and the circumstances that all simulations of a study share."""

    lengths: Lengths
    samples: int | None = None
    seed: int = 0
    sharding: Sharding = Sharding.EVEN
    costs: Costs = field(default_factory=Costs)
    conditions: Conditions = STEADY
    terms: Terms = JOIN_ALL

    def build_workload(self, ranks: int, samples: int | None = None) -> Workload:
        """Returns what ``ranks`` ranks read: ``samples`` in place of the study's.

        Raises: UsageError when there are more ranks than samples.
        """
        samples = self.samples if samples is None else samples
        return build_workload(self.lengths, ranks=ranks, sharding=self.sharding, samples=samples, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The points of a study, in order.

    Raises: UsageError when a point makes no sense, before any is run.
    """

    study: Study
    points: tuple[Point, ...]
    batch_size: int | None = None
    """Samples of a fixed batch; None: as many of the longest as fit the budget."""

    def __post_init__(self) -> None:
        for ranks in dict.fromkeys(point.ranks for point in self.points):
            workload = self.study.build_workload(ranks)
            for point in self.points:
                if point.ranks == ranks:
                    self.build_run(point, workload)

    def build_run(self, point: Point, workload: Workload) -> Run:
        """Returns the simulation of ``point``.

        Raises: UsageError when it makes no sense.
        """
        what = Run(
            workload=workload,
            policy=point.policy,
            budget_tokens=point.budget_tokens,
            batch_size=self.batch_size,
            window_samples=point.window_samples,
            depth_steps=point.depth_steps,
            sharding=self.study.sharding,
            seed=self.study.seed,
            costs=self.study.costs,
            conditions=self.study.conditions,
        )
        return self.study.terms.apply(what)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a point."""

    point: Point
    summary: Summary
    first_step_s: float
    """Simulated seconds from the start until a rank has its first step, mean over ranks."""
    cautions: tuple[Caution, ...] = ()
    steady_tokens_per_s: float | None = None
    """Real tokens a second apart from both ends of the epoch; None where there is too little between them."""

    @property
    def rate(self) -> float:
        """Tokens a second that a long run has: of the steady state where it is known."""
        return self.summary.tokens_per_s if self.steady_tokens_per_s is None else self.steady_tokens_per_s

    def to_json(self) -> dict[str, str | int | float | None]:
        """Returns the figures, without the one that depends on the machine: the same grid gives the same bytes."""
        figures = self.summary.to_json()
        figures |= {"first_step_s": self.first_step_s, "steady_tokens_per_s": self.steady_tokens_per_s}
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
    """Returns every combination, in the order given, ranks first. A policy without a window gets the first one only."""
    return tuple(
        Point(policy=policy, ranks=rank, budget_tokens=budget, window_samples=window, depth_steps=depth)
        for rank, budget, policy, window, depth in product(ranks, budgets, policies, windows, depths)
        if has_window(policy) or window == windows[0]
    )


class Local(Executor):
    """Runs everything at once, in this process: for one worker, and for tests."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns a future that is done already."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except OdbError as error:
            future.set_exception(error)
        return future


def make_executor(workers: int) -> Executor:
    """Returns an executor of so many processes of this machine; for one, this process.

    Raises: UsageError when there is less than one.
    """
    if workers < 1:
        raise UsageError(f"--processes must be at least 1, got {workers}")
    if workers == 1:
        return Local()
    return ProcessPoolExecutor(workers) if sys.platform == "win32" else _Pool(workers)


class _Pool(ProcessPoolExecutor):
    """Processes that Ctrl-C ends without a traceback, even while they start, and that do not outlive whoever asked for them."""

    def __init__(self, workers: int) -> None:
        self._others = set(active_children())
        # Not forked: a progress bar has a thread, and what a fork makes of its locks is luck.
        super().__init__(workers, mp_context=get_context("spawn"), initializer=_begin_worker)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns a future of a process, started here where there are too few; it inherits that the signal is held back."""
        with _hold_back():
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Ends processes that have missed the signal, too: a broken pool does not miss one that starts while others die."""
        if isinstance(error, KeyboardInterrupt):
            for process in set(active_children()) - self._others:
                process.terminate()
        return super().__exit__(kind, error, traceback)


@contextmanager
def _hold_back() -> Iterator[None]:
    """Holds Ctrl-C back until this is done: blocked for processes that are started here, and put off by a handler in this one,
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


def _begin_worker() -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_parent() -> None:
    # Of a parent that is killed, or ended by SIGTERM, a worker hears nothing: it would wait for its next task for ever.
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def simulate_point(grid: Grid, point: Point) -> Answer:
    """Returns the answer of one point: what a worker of the executor runs.

    Raises: InvariantError, naming the point, when a property of the protocol does not hold.
    """
    try:
        what = grid.build_run(point, grid.study.build_workload(point.ranks, point.samples))
        result = run(what)
    except InvariantError as error:
        raise InvariantError(error.invariant, f"{point}: {error.detail}") from None
    first_step_s = result.rows[0].data_wait_s / point.ranks if result.rows else 0.0
    return Answer(point, result.summary, first_step_s, result.cautions, compute_steady_rate(what, result.rows))


def compute_steady_rate(what: Run, rows: Sequence[StepRow]) -> float | None:
    """Returns real tokens a second in the rounds in which every window is full; None where they are fewer than
    `FEWEST_WINDOWS`, or shards are uneven: then an epoch is all beginning and end.

    Left out are the first rounds, whose windows are smaller, the one after them, and those at the end in which some rank has
    nothing more to read: a long run has as many of them as a short one.
    """
    shards = np.diff(what.workload.offsets)
    full = int(shards.min()) // what.window_samples
    first = what.ramp_rounds + 1
    steady = [row for row in rows if first <= row.round < full]
    is_uneven = shards.max() - shards.min() > 1
    if not what.is_protocol or is_uneven or full - first < FEWEST_WINDOWS or not steady:
        return None
    return sum(row.real_tokens for row in steady) / (steady[-1].end_s - steady[0].start_s)


def run_grid(grid: Grid, executor: Executor, on_done: Callable[[int], None] | None = None) -> list[Answer]:
    """Returns the answers of all points, in the order of the grid. ``on_done`` hears how many are done.

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
