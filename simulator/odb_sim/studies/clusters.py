"""Executors for sweeps by address: a Dask or a Ray cluster, or the processes of this machine.

Neither Dask nor Ray is needed by anything else here, so each is imported when its address is given.
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
from types import FrameType, ModuleType
from typing import Final, ParamSpec, Protocol, TypeAlias, TypeVar

from odb_ref.core.errors import UsageError
from odb_sim.studies.cells import ClusterGone, WatchedExecutor
from odb_sim.studies.processes import make_executor

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

P = ParamSpec("P")
T = TypeVar("T")

ADDRESSES: Final = "dask://HOST:PORT, ray://HOST:PORT or ray://local"
_CONNECT_S: Final = 10
_CLOSE_S: Final = 2
_WORKERLESS_S: Final = 30.0
"""How long a study waits for a cluster that has no worker."""


@contextmanager
def open_executor(address: str | None, workers: int) -> Iterator[Executor]:
    """Yields the executor at ``address`` (`ADDRESSES`); the cluster's workers need this package. Without an address,
    ``workers`` processes of this machine. Closed in the end.

    Raises: UsageError when the address is of no known kind, nobody answers there, or Dask or Ray is missing.
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
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # what it has to say, check() does
    # It warns of lengths by the million, which are sent with each simulation, as they must: a worker that has them may die.
    warnings.filterwarnings("ignore", message="Sending large graph")
    try:
        yield executor
    finally:
        # Not waited for: what is under way when this is broken off would take its time.
        with suppress(Exception):  # nor is it news that a cluster is gone
            executor.shutdown(wait=False)
            client.close(timeout=_CLOSE_S)


class _DaskExecutor(WatchedExecutor):
    """Dask's own executor, and whether there is still anybody behind it."""

    def __init__(self, client: Client, address: str) -> None:
        self._client = client
        self._executor: Executor = client.get_executor()
        self._address = address
        self._seen_s = time.monotonic()
        """When a worker was there last."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns Dask's future.

        Raises: UsageError when the cluster is gone.
        """
        try:
            return self._executor.submit(fn, *args, **kwargs)
        except Exception as error:  # Dask has errors of its own for it
            raise ClusterGone(f"{self._address} is gone: {' '.join(str(error).split())[:100]}") from error

    def check(self) -> None:
        """Looks whether a scheduler and a worker are there.

        Raises: UsageError when not.
        """
        if self._client.status not in ("running", "connecting", "newly-created"):
            raise ClusterGone(f"{self._address} is gone")
        now_s = time.monotonic()
        if self._client.status != "running" or self._client.nthreads():
            self._seen_s = now_s
        elif now_s - self._seen_s > _WORKERLESS_S:
            raise ClusterGone(f"{self._address} has had no worker for {_WORKERLESS_S:.0f} s")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Gives up what is under way."""
        self._executor.shutdown(wait=wait)


class Client(Protocol):
    """What is used of `distributed.Client`."""

    status: str

    def get_executor(self) -> Executor:
        """Returns its executor."""
        ...

    def nthreads(self) -> Mapping[str, int]:
        """Returns the threads of each worker."""
        ...


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
        # Ray's own handler ends the process in the midst of whatever it does, with a status of its own.
        with _keeping_handlers(handlers):
            yield _RayExecutor(ray)
    finally:
        ray.shutdown()


@contextmanager
def _keeping_handlers(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """Sets the handlers of signals back to what they were before something has set its own."""
    if current_thread() is main_thread():
        for sent, handler in handlers.items():
            signal.signal(sent, handler)
    yield


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
