"""Executors for sweeps by address: a Dask or a Ray cluster, or the processes of this machine.

Nothing else in this program needs Dask or Ray, so each is imported only when its address is given.
"""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from threading import current_thread, main_thread
from types import ModuleType
from typing import Final, ParamSpec, Protocol, TypeVar

from odb_ref.core.errors import UsageError
from odb_sim.studies.cells import ClusterGone, WatchedExecutor
from odb_sim.studies.processes import make_executor

P = ParamSpec("P")
T = TypeVar("T")

ADDRESSES: Final = "dask://HOST:PORT, ray://HOST:PORT or ray://local"
_CONNECT_S: Final = 10
_CLOSE_S: Final = 2
_WORKERLESS_S: Final = 30.0
"""The seconds that a study waits for a cluster without workers."""


@contextmanager
def open_executor(address: str | None, workers: int) -> Iterator[Executor]:
    """Yields the executor at ``address`` (see `ADDRESSES`), and closes it in the end. The cluster's workers need this package.
    Without an address the executor has ``workers`` processes of this machine.

    Raises: UsageError when the kind of address is unknown, the cluster does not answer, or Dask or Ray is missing.
    """
    if address is None:
        with make_executor(workers) as executor:
            yield executor
        return
    scheme, _, place = address.partition("://")
    match scheme:
        case "dask" if place:
            opened = _open_dask(place)
        case "ray" if place:
            opened = _open_ray(place)
        case _:
            raise UsageError(f"--executor {address}: expected {ADDRESSES}")
    with opened as executor:
        yield executor


@contextmanager
def _open_dask(place: str) -> Iterator[Executor]:
    distributed = _import("distributed", "dask")
    try:
        client = distributed.Client(f"tcp://{place}", timeout=_CONNECT_S)
    except (OSError, ValueError) as error:
        raise _complain(f"dask://{place}", error) from error
    executor = _DaskExecutor(client, f"dask://{place}")
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # check() reports the same
    # Dask warns of millions of lengths sent with each simulation. They must be, because a worker that has them may die.
    warnings.filterwarnings("ignore", message="Sending large graph")
    try:
        yield executor
    finally:
        # Without waiting, because work under way at an interruption would take long.
        with suppress(Exception):  # the cluster may be gone, which does not matter now
            executor.shutdown(wait=False)
            client.close(timeout=_CLOSE_S)


class _DaskExecutor(WatchedExecutor):
    """Dask's own executor, with a check that the cluster still has workers."""

    def __init__(self, client: Client, address: str) -> None:
        self._client = client
        self._executor: Executor = client.get_executor()
        self._address = address
        self._seen_s = time.monotonic()
        """When a worker was last seen."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns Dask's future. Raises: UsageError when the cluster is gone."""
        try:
            return self._executor.submit(fn, *args, **kwargs)
        except Exception as error:  # Dask has errors of its own for it
            raise ClusterGone(f"{self._address} is gone: {' '.join(str(error).split())[:100]}") from error

    def check(self) -> None:
        """Checks that there are a scheduler and a worker. Raises: UsageError when there are not."""
        if self._client.status not in ("running", "connecting", "newly-created"):
            raise ClusterGone(f"{self._address} is gone")
        now_s = time.monotonic()
        if self._client.status != "running" or self._client.nthreads():
            self._seen_s = now_s
        elif now_s - self._seen_s > _WORKERLESS_S:
            raise ClusterGone(f"{self._address} has had no worker for {_WORKERLESS_S:.0f} s")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Gives up all work under way."""
        self._executor.shutdown(wait=wait)


class Client(Protocol):
    """The part of `distributed.Client` that is used."""

    status: str

    def get_executor(self) -> Executor:
        """Returns the client's executor."""

    def nthreads(self) -> Mapping[str, int]:
        """Returns the threads of each worker."""


@contextmanager
def _open_ray(place: str) -> Iterator[Executor]:
    ray = _import("ray", "ray")
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    if place == "local":
        options |= {"include_dashboard": False}
    handlers = {sent: signal.getsignal(sent) for sent in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address="local" if place == "local" else f"ray://{place}", **options)
    except (OSError, ValueError, ImportError) as error:
        raise _complain(f"ray://{place}", error) from error
    try:
        if current_thread() is main_thread():
            # Ray's own signal handler would end the process at once, with its own status.
            for sent, handler in handlers.items():
                signal.signal(sent, handler)
        yield _RayExecutor(ray)
    finally:
        ray.shutdown()


class _RayExecutor(Executor):
    """Ray's tasks as futures."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns a future of a task of the cluster."""
        future: Future[T] = self._ray.remote(_call).remote(partial(fn, *args, **kwargs)).future()
        return future


def _call(task: Callable[[], T]) -> T:
    return task()


def _import(module: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise UsageError(f"--executor {extra}://... needs {module}: pip install 'odb-ref[{extra}]'") from None


def _complain(address: str, error: Exception) -> UsageError:
    return UsageError(f"--executor {address}: no answer: {' '.join(str(error).split())[:200]}")
