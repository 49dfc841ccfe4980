"""Arguments of the loader, refused before any process has started."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Final

import numpy as np
import torch.multiprocessing

from odb_ref.core.errors import MOST, UsageError, check_integer, read_integer
from odb_ref.torch.exchange.collectives import TRANSPORTS
from odb_ref.torch.reading.source import LoaderOptions

NUMBERS: Final = (int, float, np.integer, np.floating)
MOST_SECONDS: Final = 1e9
"""Thirty years: a system call takes no more."""

_MOST_PROCESSES: Final = 2**16
_MOST_READY: Final = 2**16
"""Batches that a worker may have ready: a DataLoader counts up to it before it reads."""


def check_seconds(value: object, name: str, *, is_zero_allowed: bool) -> float:
    """Returns the value.

    Raises: UsageError when it is not a time.
    """
    if isinstance(value, bool) or not isinstance(value, NUMBERS) or not math.isfinite(value):
        raise UsageError(f"{name} must be a number of seconds, got {value!r}")
    if value < 0 or (value == 0 and not is_zero_allowed):
        raise UsageError(f"{name} must {'not be negative' if is_zero_allowed else 'be positive'}, got {value}")
    return min(float(value), MOST_SECONDS)


def check_optional(value: object, name: str, least: int, most: int = MOST) -> int | None:
    """Returns the value.

    Raises: UsageError when it is neither None nor an integer between these bounds.
    """
    return None if value is None else check_integer(value, name, least, most)


def check_flag(value: object, name: str) -> bool:
    """Returns the value, true or false of any library's.

    Raises: UsageError when it is neither.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise UsageError(f"{name} must be True or False, got {value!r}")


def check_max_bad(value: object) -> float:
    """Returns the value: a number of samples, or as a fraction a share of them.

    Raises: UsageError when it is not a limit.
    """
    if isinstance(value, bool) or not isinstance(value, NUMBERS) or not value >= 0:
        raise UsageError(f"max_bad_samples must be a number of samples or a share, got {value!r}")
    number = read_integer(value)
    if number is None and not value < 1:
        raise UsageError(f"max_bad_samples must be an integer, or a share below 1, got {value!r}")
    return float(value) if number is None else number


def check_name(value: object) -> str:
    """Returns the value.

    Raises: UsageError when it is not a text.
    """
    if isinstance(value, str) and value:
        return value
    raise UsageError(f"name must be a text, got {value!r}")


def check_functions(**functions: object) -> None:
    """Checks that each can be called, or is None.

    Raises: UsageError.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function, got {type(function).__name__}")


def check_transport(name: str) -> str:
    """Returns the name.

    Raises: UsageError when there is no such transport.
    """
    if name not in TRANSPORTS:
        raise UsageError(f"no transport {name!r}; there are {', '.join(sorted(TRANSPORTS))}")
    return name


def _can_pin() -> bool:
    """Returns False, with the warning that a DataLoader gives, where there is no device to pin memory for."""
    has_device = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
    if not has_device or torch.backends.mps.is_available():
        warnings.warn("pin_memory=True, but there is no accelerator to pin memory for: it is not pinned", stacklevel=4)
        return False
    return True


def make_loader_options(
    *,
    num_workers: object,
    prefetch_factor: object,
    persistent_workers: object,
    multiprocessing_context: object,
    worker_init_fn: Callable[[int], None] | None,
    timeout: object,
    pin_memory: object,
    silence_s: object,
) -> LoaderOptions:
    """Returns what the inner DataLoader is made with.

    Raises: UsageError where a DataLoader would, and where the value makes no sense.
    """
    check_functions(worker_init_fn=worker_init_fn)
    workers = check_integer(num_workers, "num_workers", 0, _MOST_PROCESSES)
    prefetch = check_optional(prefetch_factor, "prefetch_factor", 1, _MOST_READY)
    timeout_s = check_seconds(timeout, "timeout", is_zero_allowed=True)
    is_persistent = None if persistent_workers is None else check_flag(persistent_workers, "persistent_workers")
    is_named = isinstance(multiprocessing_context, str)
    if is_named and multiprocessing_context not in (known := torch.multiprocessing.get_all_start_methods()):
        raise UsageError(
            f"multiprocessing_context must be one of {', '.join(known)} here, got {multiprocessing_context!r}"
        )
    if not (is_named or multiprocessing_context is None or isinstance(multiprocessing_context, BaseContext)):
        raise UsageError(f"multiprocessing_context must be a name or a context, got {multiprocessing_context!r}")
    if workers and os.name != "posix":
        raise UsageError(f"num_workers={workers} needs Linux or macOS: with num_workers=0 the loader works here too")
    if not workers:
        given: dict[str, object] = {"prefetch_factor": prefetch, "multiprocessing_context": multiprocessing_context}
        given |= {"persistent_workers": is_persistent or None, "timeout": timeout_s or None}
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name} needs num_workers of at least 1, got {name}={value!r} and num_workers=0")
    return LoaderOptions(
        num_workers=workers,
        prefetch_factor=prefetch,
        persistent_workers=is_persistent,
        multiprocessing_context=multiprocessing_context,
        worker_init_fn=worker_init_fn,
        timeout=timeout_s,
        is_pinned=check_flag(pin_memory, "pin_memory") and _can_pin(),
        silence_s=check_seconds(silence_s, "timeout_s", is_zero_allowed=False),
    )
