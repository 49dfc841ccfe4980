"""Executors for sweeps by address: a Dask or a Ray cluster, or the processes of this machine.

Neither Dask nor Ray is needed by anything else here, so each is imported when its address is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Final, ParamSpec, TypeVar

from odb_ref.core.errors import UsageError
from odb_sim.studies.processes import make_executor

P = ParamSpec("P")
T = TypeVar("T")

ADDRESSES: Final = "dask://HOST:PORT, ray://HOST:PORT or ray://local"
_CONNECT_S: Final = 10
_CLOSE_S: Final = 2


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
    executor: Executor = client.get_executor()
    try:
        yield executor
    finally:
        # Not waited for: what is under way when this is broken off would take its time.
        executor.shutdown(wait=False)
        client.close(timeout=_CLOSE_S)


@contextmanager
def _open_ray(place: str) -> Iterator[Executor]:
    ray = _import("ray", "ray")
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    if place == "local":
        options |= {"include_dashboard": False}
    try:
        ray.init(address="local" if place == "local" else f"ray://{place}", **options)
    except (OSError, ValueError, ImportError) as error:
        raise _complain(f"ray://{place}", error) from error
    try:
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
    return UsageError(f"--executor {address}: nobody answers: {' '.join(str(error).split())[:200]}")
