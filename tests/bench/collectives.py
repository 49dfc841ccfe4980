"""Counts the collectives that anyone in this process, or in a process it forks, asks torch.distributed for."""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_coalesced",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
)


class Meter:
    """Collectives, and the bytes of the tensors they were given: what a rank puts in and what it gets back.

    Wraps the public functions by name, before the loader is made; loaders that fork a process for the exchange are counted
    there too, since the counters lie in shared memory. An object collective counts as the tensor collectives it is made of.
    """

    def __init__(self) -> None:
        self._counts = multiprocessing.Array("q", 2)
        self._inside = threading.local()
        for name in NAMES:
            function = getattr(distributed_c10d, name, None)
            if function is not None:
                wrapped = self._wrap(function)
                setattr(distributed_c10d, name, wrapped)
                if hasattr(dist, name):
                    setattr(dist, name, wrapped)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "is_set", False):
                return function(*args, **kwargs)
            size = _count_bytes((*args, *kwargs.values()))
            if function.__name__ in ("all_reduce", "broadcast"):
                size *= 2  # one tensor is what goes in and what comes back
            with self._counts.get_lock():
                self._counts[0] += 1
                self._counts[1] += size
            self._inside.is_set = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.is_set = False

        return call

    def read(self) -> dict[str, int]:
        """Collectives and bytes since this meter was made."""
        with self._counts.get_lock():
            return {"collectives": self._counts[0], "bytes": self._counts[1]}


def _count_bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, list | tuple):
        return sum(map(_count_bytes, values))
    return 0
