"""What a Trainer's data set, model and collator say: which part of it a rank reads, and how its samples are to be counted.

The Trainer's own loader hands each sample of a stream to one rank. An `odb_ref.torch.ODBDataLoader` reads what a rank is given,
so that what all ranks are given alike would be trained on by each of them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch.utils.data import Dataset, IterableDataset
from transformers import TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from odb_ref.torch import UsageError
from odb_ref.torch.loop import count_pairs, split_pairs
from odb_ref.torch.reading.tasks import is_pair, measure_rows

PAIRS: Final[dict[str, object]] = {"split": split_pairs, "count": count_pairs}
"""How the batches of TRL's and LLaMA-Factory's preference collators go in halves: options of `ODBOptions`."""


@dataclass(frozen=True, slots=True)
class CollatedLength:
    """A ``length_fn``: a sample's tokens after a collator that cuts rows, and pads them to a multiple."""

    multiple: int = 1
    max_length: int | None = None

    def __call__(self, sample: object) -> int:
        """Returns the tokens of all rows of the sample."""
        rows, longest = measure_rows(sample)
        if self.max_length is not None:
            longest = min(longest, self.max_length)
        return rows * (-(-longest // self.multiple) * self.multiple)


def predicts_next_token(model: object, *, is_smoothed: bool = False) -> bool | None:
    """Returns whether a model of transformers predicts each label from the token before it; None where its class says nothing.

    With ``is_smoothed`` the Trainer's own smoother makes the loss, which shifts labels for the classes that it knows by name.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None))
    if loss is None and any(base.__name__.endswith("ForCausalLM") for base in type(model).__mro__[1:]):
        return not is_smoothed  # a subclass under a name of its own
    return None if loss is None else loss is ForCausalLMLoss


def predicts_first_label(model: object) -> bool:
    """Returns whether virtual tokens stand before each row and predict its first label too: PEFT's prompt and P-tuning."""
    config: object = getattr(model, "active_peft_config", None)
    kind: object = getattr(config, "peft_type", None)
    # These have no virtual tokens in the row, or a loss of their own.
    return bool(getattr(config, "is_prompt_learning", False)) and kind not in ("PREFIX_TUNING", "CARTRIDGE", "CPT")


def make_counting_options(
    model: object, collator: object, *, is_packed: bool, is_smoothed: bool = False
) -> dict[str, object]:
    """Returns the arguments of `odb_ref.torch.ODBDataLoader` that count as model and collator do."""
    options: dict[str, object] = {}
    is_shifted = predicts_next_token(model, is_smoothed=is_smoothed)
    if is_shifted is not None:
        options["causal_shift"] = is_shifted and (is_packed or not predicts_first_label(model))
    multiple = getattr(collator, "pad_to_multiple_of", None)
    if multiple and not is_packed:
        options["length_fn"] = CollatedLength(multiple)
    return options


def choose_layout(collator: object, loader: Mapping[str, object]) -> dict[str, object]:
    """Returns the layout that a collator asks for, where it lays samples end to end; nothing else.

    Raises: UsageError when the loader's arguments say another.
    """
    if "Flattening" not in type(collator).__name__:
        return {}
    if loader.get("layout", "packed") != "packed":
        raise UsageError(
            f"{type(collator).__name__} lays samples end to end, and layout={loader['layout']!r} would count padding: say "
            "layout='packed', or pass a collator that pads"
        )
    return {"layout": "packed"}


def has_pairs(dataset: object) -> bool:
    """Returns whether a data set has preference pairs; of one that is read as a stream, the columns tell."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        return is_pair(dict.fromkeys(names, ()))
    try:
        return is_pair(dataset[0])  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        return False


def warn_of_shards(dataset: object, world_size: int) -> None:
    """Warns of a stream whose shards are dealt out to the ranks, where a plain Trainer deals out samples."""
    shards = getattr(dataset, "num_shards", 1)
    if world_size > 1 and shards % world_size == 0:
        warnings.warn(
            f"each of {world_size} ranks reads its own of {shards} shards, and a plain Trainer has rank 0 read all and "
            "deal out samples: with accelerator_config={'dispatch_batches': False} its updates hold the same",
            RuntimeWarning,
            stacklevel=4,
        )


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
