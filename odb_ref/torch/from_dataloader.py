"""`apply`: an `ODBDataLoader` in place of a DataLoader that a framework has made."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sized
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
"""What is taken over from the DataLoader, unless it is given."""

_OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


def apply(dataloader: DataLoader[object], *, token_budget: int, **options: Unpack[LoaderArguments]) -> ODBDataLoader:
    """Returns an `ODBDataLoader` over the data set of ``dataloader``, with its workers and its ``collate_fn``.

    ``options`` are those of `ODBDataLoader` and come first. A random, sequential or distributed sampler of the whole data set
    is replaced by the loader's own shards, in random or sequential order: the first two read everything on every rank, the
    last pads shards by repeating samples, or drops some. What seeded the shuffling still does. Any other sampler is kept and
    read as it is, one of a part of the data set too; its batches are formed anew.

    Warns of ``drop_last`` where there are no updates of a fixed size (``update_samples``).

    Raises: UsageError when the DataLoader has no samples to batch, or a batch sampler of your own, and as `ODBDataLoader`.
    """
    adopted = adopt_options(dataloader, options)
    return ODBDataLoader(dataloader.dataset, token_budget=token_budget, **adopted)  # type: ignore[arg-type]


def adopt_options(dataloader: DataLoader[object], options: Mapping[str, object]) -> dict[str, object]:
    """Returns what `apply` tells the `ODBDataLoader` that it makes: ``options``, and what they leave to ``dataloader``.

    Raises: UsageError when the DataLoader has no samples to batch, or a batch sampler of the user's own.
    """
    found = dict(options)
    if dataloader.batch_sampler is None and "collate_fn" not in options:
        raise UsageError("apply: a DataLoader with batch_size=None has no collate_fn for several samples: pass one")
    # Where the user makes the batch sampler, the DataLoader itself says False.
    if getattr(dataloader.batch_sampler, "drop_last", False) and "drop_last" not in options:
        if options.get("update_samples") is None:
            what = "apply: drop_last=True means nothing here: ranks end together, and each sample is read"
            warnings.warn(what, RuntimeWarning, stacklevel=3)
        else:
            found["drop_last"] = True
    has_workers = bool(options.get("num_workers", dataloader.num_workers))
    for name in ADOPTED:
        value: object = getattr(dataloader, name)
        # A DataLoader without workers refuses to be told about them.
        if name not in options and value is not None and (has_workers or name not in _OF_WORKERS):
            found[name] = value
    if not {"sampler", "shuffle", "shard"} & options.keys():
        _check_batch_sampler(dataloader.batch_sampler)
        adopted = _adopt_order(dataloader)
        if {"seed", "generator"} & options.keys():
            adopted = {key: value for key, value in adopted.items() if key not in ("seed", "generator")}
        found |= adopted
    return found


def _check_batch_sampler(batch_sampler: object) -> None:
    """Raises: UsageError when the user's own class has composed batches, which would not be those that are read."""
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        raise UsageError(
            f"apply: batches are formed under the token budget, and those of {type(batch_sampler).__name__} would be left out: "
            "pass shuffle=, shard= or sampler= to say what is read"
        )


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
        raise UsageError(f"apply: a batch sampler without a sampler ({type(sampler).__name__}): pass sampler=")
    return {"sampler": sampler}


def lists_all(sampler: object, dataset: object) -> bool:
    """Returns True of a sampler of torch's that lists each sample of a data set once, in random or sequential order."""
    match sampler:
        case DistributedSampler():
            return _is_plain(sampler, DistributedSampler) and _holds_all(sampler.dataset, dataset)
        case RandomSampler():
            return _holds_all(sampler.data_source, dataset) and _draws_each_once(sampler)
        case SequentialSampler():
            return _is_plain(sampler, SequentialSampler) and _holds_all(sampler.data_source, dataset)
        case _:
            return False


def _is_plain(sampler: object, kind: type[object]) -> bool:
    """Returns True when the sampler lists what one of its kind lists: a class of the user's may leave samples out."""
    return type(sampler).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _holds_all(source: object, dataset: object) -> bool:
    """Returns True when what a sampler lists is the whole data set, and not the first samples of it."""
    return isinstance(source, Sized) and isinstance(dataset, Sized) and len(source) == len(dataset)


def _draws_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
