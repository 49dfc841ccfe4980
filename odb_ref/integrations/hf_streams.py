"""The data set that a Trainer reads, where it is a stream: each rank's part of it.

The Trainer's own loader hands each sample of a stream to one rank. An `odb_ref.torch.ODBDataLoader` reads what a rank is given,
so that what all ranks are given alike would be trained on by each of them.
"""

from __future__ import annotations

import importlib

from torch.utils.data import Dataset, IterableDataset
from transformers import TrainingArguments

from odb_ref.torch import UsageError


def take_share(dataset: Dataset[object], args: TrainingArguments, shard: object) -> Dataset[object]:
    """Returns what of a Trainer's data set an `odb_ref.torch.ODBDataLoader` is to read here.

    That is all of it, which the loader shares out by itself; but of a stream this rank's part. One of the package datasets is
    split as that package does, where the caller has not done so. ``shard`` is the option of the loader.

    Raises: UsageError when ranks would read the same, for all that can be told.
    """
    is_whole = isinstance(dataset, IterableDataset) and getattr(dataset, "_distributed", None) is None
    if args.world_size == 1 or shard == "given" or not is_whole:
        return dataset
    if not type(dataset).__module__.startswith("datasets."):
        raise UsageError(
            f"{type(dataset).__name__} is iterable, so each of {args.world_size} ranks reads what it is given, and may be "
            "given the same: have each yield its own samples, by its rank, and say ODBOptions(loader={'shard': 'given'})"
        )
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    share: Dataset[object] = split(dataset, rank=args.process_index, world_size=args.world_size)
    return share
