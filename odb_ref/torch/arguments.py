"""Checks the arguments of `ODBDataLoader` and combines them, before any process has started."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Final

import numpy as np
import torch.multiprocessing
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from odb_ref.core.errors import MOST, UsageError, check_integer, read_integer
from odb_ref.torch.exchange.collectives import TRANSPORTS
from odb_ref.torch.plan.order import Order
from odb_ref.torch.plan.sampler import AllReplicas
from odb_ref.torch.reading.source import LoaderOptions
from odb_ref.torch.settings import FORMED

NUMBERS: Final = (int, float, np.integer, np.floating)
MOST_SECONDS: Final = 1e9
"""About thirty years; system calls accept no longer timeout."""
LEAST_SILENCE_S: Final = 1.0

SAMPLES: Final = "samples"
"""The ``len()`` bound that always holds: in each step some rank trains, so an epoch has at most as many steps as samples."""

_LEAST_SEED: Final = -(2**63)
_MOST_SEED: Final = 2**64 - 1
"""The limits of `torch.manual_seed`."""
_MOST_PROCESSES: Final = 2**16
_MOST_READY: Final = 2**16
"""Batches that a worker may have ready. A DataLoader counts up to this number before it reads."""


def check_seconds(value: object, name: str, *, is_zero_allowed: bool) -> float:
    """Returns the value. Raises: UsageError when it is not a valid time."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS) or not math.isfinite(value):
        raise UsageError(f"{name} must be a number of seconds, got {value!r}")
    if value < 0 or (value == 0 and not is_zero_allowed):
        raise UsageError(f"{name} must {'not be negative' if is_zero_allowed else 'be positive'}, got {value}")
    return min(float(value), MOST_SECONDS)


def check_silence(value: object) -> float:
    """Returns the value. Raises: UsageError when it is not a time in which a process is looked at twice."""
    seconds = check_seconds(value, "timeout_s", is_zero_allowed=False)
    if seconds < LEAST_SILENCE_S:
        raise UsageError(
            f"timeout_s must be at least {LEAST_SILENCE_S:g} s, got {value}: processes give a sign of life every half second, "
            "so a shorter silence says nothing"
        )
    return seconds


def check_optional(value: object, name: str, least: int, most: int = MOST) -> int | None:
    """Returns the value. Raises: UsageError when it is neither None nor an integer between these bounds."""
    return None if value is None else check_integer(value, name, least, most)


def check_flag(value: object, name: str) -> bool:
    """Returns the value as a bool; accepts Python's and NumPy's. Raises: UsageError when it is not a bool."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise UsageError(f"{name} must be True or False, got {value!r}")


def check_max_bad(value: object) -> float:
    """Returns the limit: a number of samples, or a fraction below 1 for a share of them.

    Raises: UsageError when it is not a valid limit.
    """
    if isinstance(value, bool) or not isinstance(value, NUMBERS) or not value >= 0:
        raise UsageError(f"max_bad_samples must be a number of samples or a share, got {value!r}")
    number = read_integer(value)
    if number is None and not value < 1:
        raise UsageError(f"max_bad_samples must be an integer, or a share below 1, got {value!r}")
    return float(value) if number is None else number


def check_name(value: object) -> str:
    """Returns the value. Raises: UsageError when it is not a non-empty string."""
    if isinstance(value, str) and value:
        return value
    raise UsageError(f"name must be a string, got {value!r}")


def check_functions(**functions: object) -> None:
    """Checks that each value is callable or None. Raises: UsageError."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function, got {type(function).__name__}")


def check_kind(value: object, name: str, kind: type | tuple[type, ...], what: str) -> None:
    """Checks that a value is of a kind, or None. Raises: UsageError."""
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{name} must be {what}, got {value!r}")


def check_transport(name: str) -> str:
    """Returns the name. Raises: UsageError when there is no such transport."""
    if name not in (known := sorted(TRANSPORTS)):
        raise UsageError(f"unknown transport {name!r}; choose from {', '.join(known)}")
    return name


def _can_pin() -> bool:
    """Returns False, with a DataLoader's warning, if no device benefits from pinned memory."""
    if not torch.accelerator.is_available() or torch.backends.mps.is_available():
        warnings.warn("pin_memory=True has no effect: there is no accelerator to pin memory for", stacklevel=4)
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
    """Returns the options of the inner DataLoader.

    Raises: UsageError for values that a DataLoader refuses, and for other impossible ones.
    """
    check_functions(worker_init_fn=worker_init_fn)
    workers = check_integer(num_workers, "num_workers", 0, _MOST_PROCESSES)
    prefetch = check_optional(prefetch_factor, "prefetch_factor", 1, _MOST_READY)
    timeout_s = check_seconds(timeout, "timeout", is_zero_allowed=True)
    is_persistent = None if persistent_workers is None else check_flag(persistent_workers, "persistent_workers")
    context, known = multiprocessing_context, torch.multiprocessing.get_all_start_methods()
    if isinstance(context, str) and context not in known:
        raise UsageError(f"multiprocessing_context must be one of {', '.join(known)} on this system, got {context!r}")
    if not (context is None or isinstance(context, str | BaseContext)):
        raise UsageError(f"multiprocessing_context must be a name or a context, got {context!r}")
    if workers and os.name != "posix":
        raise UsageError(f"num_workers={workers} needs Linux or macOS. On this system, use num_workers=0")
    if not workers:
        given: dict[str, object] = {"prefetch_factor": prefetch, "multiprocessing_context": context}
        given |= {"persistent_workers": is_persistent or None, "timeout": timeout_s or None}
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name} needs num_workers of at least 1, got {name}={value!r} and num_workers=0")
    return LoaderOptions(
        num_workers=workers,
        prefetch_factor=prefetch,
        persistent_workers=is_persistent,
        multiprocessing_context=context,
        worker_init_fn=worker_init_fn,
        timeout=timeout_s,
        is_pinned=check_flag(pin_memory, "pin_memory") and _can_pin(),
        silence_s=check_silence(silence_s),
    )


def check_updates(update_samples: object, others: Mapping[str, object]) -> int | None:
    """Returns the number of samples in an optimizer update, or None if it is not fixed.

    Raises: UsageError when it is not a number, or is combined with another option that defines updates or bounds windows.
    """
    if update_samples is None:
        return None
    given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
    if given:
        raise UsageError(
            f"update_samples and {given[0]} exclude each other: each update is formed as a whole, from its own samples"
        )
    return check_integer(update_samples, "update_samples", 1)


def make_order(
    dataset: object,
    *,
    sampler: Iterable[object] | None,
    shuffle: bool,
    shard: str,
    seed: int,
    generator: torch.Generator | None,
    num_workers: int = 0,
    update_samples: int | None = None,
    drop_last: bool = False,
) -> Order:
    """Returns the order from which an epoch takes its keys. Raises: UsageError when the options exclude each other."""
    is_iterable = isinstance(dataset, IterableDataset)
    shuffle = check_flag(shuffle, "shuffle")
    if shard not in ("auto", "shared", "given"):
        raise UsageError(f"shard must be 'auto', 'shared' or 'given', got {shard!r}")
    if shard == "shared" and is_iterable:
        raise UsageError("shard='shared' needs a map-style data set: all ranks draw from one order of it")
    is_common = shard != "given" and not is_iterable and (sampler is None or update_samples is not None)
    if shard == "shared" and not is_common:
        raise UsageError(
            "shard='shared' with a sampler needs update_samples: without it all ranks draw from shuffle and seed"
        )
    if drop_last and update_samples is None:
        raise UsageError(
            "drop_last needs update_samples: without it batches have no fixed size, so there is no smaller last batch to drop"
        )
    if drop_last and not is_common:
        raise UsageError(
            "drop_last needs one order for all ranks: a map-style data set, and a shard other than 'given'"
        )
    if is_iterable and (sampler is not None or shuffle):
        raise UsageError("an iterable data set takes neither sampler nor shuffle")
    if sampler is not None and shuffle:
        raise UsageError("sampler and shuffle exclude each other")
    is_list = hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")
    if sampler is not None and (not is_list or getattr(sampler, "ndim", 1) == 0):
        raise UsageError(f"sampler={sampler!r}: expected a Sampler or a sequence of keys")
    if isinstance(sampler, BatchSampler):
        raise UsageError(f"sampler is a BatchSampler, which lists batches: {FORMED}; pass the sampler it was made from")
    if isinstance(sampler, Iterator):  # calling iter() on it would advance some samplers
        raise UsageError(
            "sampler is an iterator, which is empty from the second epoch on: pass a Sampler or a sequence"
        )
    if generator is not None and seed:
        raise UsageError("seed and generator exclude each other")
    if is_common and isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        sampler = AllReplicas(sampler)
    return Order(
        dataset=dataset,
        sampler=sampler,
        is_iterable=is_iterable,
        is_auto=is_common,
        is_shared=shard == "shared",
        is_shuffled=shuffle,
        seed=check_integer(seed, "seed", _LEAST_SEED, _MOST_SEED) if generator is None else draw_seed(generator),
        seed_source="" if generator is None else " drawn from generator",
        update_samples=update_samples,
        drops_last=drop_last,
        stream_workers=max(1, num_workers) if is_iterable else None,
    )


def draw_seed(generator: torch.Generator) -> int:
    """Returns a seed drawn from a generator, as a DataLoader draws one.

    Raises: UsageError when the generator is not on the CPU.
    """
    if generator.device.type != "cpu":
        raise UsageError(f"generator must be a CPU generator, got one on {generator.device}")
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def check_len_bound(bound: int | str | None, order: Order) -> int | str | None:
    """Returns the bound: a number of steps, `SAMPLES`, or None if there is none.

    Raises: UsageError when it is not a valid bound.
    """
    if isinstance(bound, str) and bound == SAMPLES:
        if not order.is_auto:
            raise UsageError(
                "len_bound='samples' needs shard='auto': otherwise no rank knows how many samples the others hold"
            )
        order.count_samples()  # raises if the number is unknown
        return bound
    if isinstance(bound, bool | str):
        raise UsageError(f"len_bound must be a number of steps or 'samples', got {bound!r}")
    return check_optional(bound, "len_bound", 1)
