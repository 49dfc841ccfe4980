"""`apply`: replaces a DataLoader that a framework has made by an `ODBDataLoader`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sized
from types import NoneType
from typing import Final, Unpack

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from odb_ref.core.errors import UsageError
from odb_ref.torch.loader import ODBDataLoader
from odb_ref.torch.settings import LoaderArguments

ADOPTED: Final = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "worker_init_fn",
    "pin_memory",
    "timeout",
    "collate_fn",
)
"""Options taken over from the DataLoader, unless they are given."""

_OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


def apply(dataloader: DataLoader[object], *, token_budget: int, **options: Unpack[LoaderArguments]) -> ODBDataLoader:
    """Returns an `ODBDataLoader` over the data set of ``dataloader``, with its workers and its ``collate_fn``.

    ``options`` are those of `ODBDataLoader` and take precedence. A random, sequential or distributed sampler of the whole data
    set is replaced by the loader's own shards, in random or sequential order. The first two would read everything on every
    rank, and the last repeats or drops samples to make shards equal. The source of the shuffling's seed remains. Any other
    sampler is kept as it is, including one of a part of the data set; only its batches are formed anew.

    Warns about ``drop_last`` without updates of a fixed size (``update_samples``).

    Raises: UsageError when the DataLoader does not batch samples, or has a batch sampler of your own, and like `ODBDataLoader`.
    """
    adopted = adopt_options(dataloader, options)
    return ODBDataLoader(dataloader.dataset, token_budget=token_budget, **adopted)  # type: ignore[arg-type]


def adopt_options(dataloader: DataLoader[object], options: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments of the `ODBDataLoader` that `apply` makes: ``options``, and for the rest those of ``dataloader``.

    Raises: UsageError when the DataLoader does not batch samples, or has a batch sampler of the user's own.
    """
    found = dict(options)
    if dataloader.batch_sampler is None and "collate_fn" not in options:
        raise UsageError(
            "apply: a DataLoader with batch_size=None has no collate_fn for several samples: pass collate_fn="
        )
    # Read it from the batch sampler: with a user's batch sampler, the DataLoader's own drop_last is False.
    if getattr(dataloader.batch_sampler, "drop_last", False) and "drop_last" not in options:
        if options.get("update_samples") is None:
            what = "apply: drop_last=True has no effect: ranks end together, and every sample is read"
            warnings.warn(what, RuntimeWarning, stacklevel=3)
        else:
            found["drop_last"] = True
    has_workers = bool(options.get("num_workers", dataloader.num_workers))
    for name, value in read_options(dataloader).items():
        # Options for workers are an error without workers.
        if name not in options and value is not None and (has_workers or name not in _OF_WORKERS):
            found[name] = value
    if not {"sampler", "shuffle", "shard"} & options.keys():
        formed = type(dataloader.batch_sampler)
        if formed not in (BatchSampler, NoneType):
            raise UsageError(
                f"apply: batches are formed under the token budget, so those of {formed.__name__} would be ignored: pass "
                "shuffle=, shard= or sampler= to choose what is read"
            )
        adopted = _adopt_order(dataloader)
        if {"seed", "generator"} & options.keys():
            adopted = {key: value for key, value in adopted.items() if key not in ("seed", "generator")}
        found |= adopted
    return found


def read_options(dataloader: DataLoader[object]) -> dict[str, object]:
    """Returns the options to take over. None stands for the default, also of ``persistent_workers``: a DataLoader does not tell
    whether its False was passed.
    """
    options: dict[str, object] = {name: getattr(dataloader, name) for name in ADOPTED}
    return options | {"persistent_workers": dataloader.persistent_workers or None}


def _adopt_order(dataloader: DataLoader[object]) -> dict[str, object]:
    if isinstance(dataloader.dataset, IterableDataset):
        return {}
    sampler: object = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
    if lists_all(sampler, dataloader.dataset):
        match sampler:
            case DistributedSampler():
                return {"shuffle": sampler.shuffle, "seed": sampler.seed}
            case RandomSampler():
                return {"shuffle": True, "generator": sampler.generator or dataloader.generator}
            case _:
                return {"shuffle": False}
    if not isinstance(sampler, Iterable):
        raise UsageError(f"apply: the batch sampler has no usable sampler ({type(sampler).__name__}): pass sampler=")
    return {"sampler": sampler}


def lists_all(sampler: object, dataset: object) -> bool:
    """Returns True for a torch sampler that lists each sample of a data set once, in random or sequential order."""
    match sampler:
        case DistributedSampler():
            return _is_plain(sampler, DistributedSampler) and _holds_all(sampler.dataset, dataset)
        case RandomSampler():
            is_whole = _holds_all(sampler.data_source, dataset) and not sampler.replacement
            return _is_plain(sampler, RandomSampler) and is_whole and sampler.num_samples == len(sampler.data_source)
        case SequentialSampler():
            return _is_plain(sampler, SequentialSampler) and _holds_all(sampler.data_source, dataset)
        case _:
            return False


def find_batch_sampler(dataloader: object) -> object:
    """Returns the batch sampler that the user gave a loader, also one that Accelerate has prepared, or None if it has none."""
    outer = getattr(dataloader, "batch_sampler", None)
    return getattr(outer, "batch_sampler", outer)


def _is_plain(sampler: object, kind: type[object]) -> bool:
    """Returns True if the sampler lists what its base class does. A user's subclass may leave samples out; that of Accelerate
    only sets a seed.
    """
    is_accelerate_s = type(sampler).__module__.startswith("accelerate.")
    return is_accelerate_s or type(sampler).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _holds_all(source: object, dataset: object) -> bool:
    """Returns True if a sampler's source is as long as the data set, and not just its beginning."""
    return isinstance(source, Sized) and isinstance(dataset, Sized) and len(source) == len(dataset)
