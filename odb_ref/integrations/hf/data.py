"""Derives settings from a Trainer's data set, model and collator: which part a rank reads, and how its samples are counted.

The Trainer's own loader hands each sample of a stream to one rank. An `odb_ref.torch.ODBDataLoader` reads all that its rank is
given, so every rank would train on a stream that all ranks are given alike.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Final

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler
from transformers import TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from odb_ref.torch import UsageError
from odb_ref.torch.from_dataloader import find_batch_sampler, lists_all
from odb_ref.torch.loop import count_pairs, split_pairs
from odb_ref.torch.reading.tasks import is_pair, measure_rows

PAIRS: Final[dict[str, object]] = {"split": split_pairs, "count": count_pairs}
"""Options of `ODBOptions` that halve the batches of TRL's and LLaMA-Factory's preference collators."""

OF_TRL: Final = ("SFTTrainer", "DPOTrainer", "RewardTrainer")
"""The Trainers of TRL whose losses are known."""


@dataclass(frozen=True, slots=True)
class CollatedLength:
    """A ``length_fn`` that returns a sample's tokens after its collator, which cuts rows and pads them to a multiple."""

    multiple: int = 1
    max_length: int | None = None

    def __call__(self, sample: object) -> int:
        """Returns the tokens of all rows of the sample."""
        rows, longest = measure_rows(sample)
        if self.max_length is not None:
            longest = min(longest, self.max_length)
        return rows * (-(-longest // self.multiple) * self.multiple)


def predicts_next_token(model: object, *, is_smoothed: bool = False) -> bool | None:
    """Returns whether a transformers model predicts each label from the token before it. None if its class does not tell.

    With ``is_smoothed`` the Trainer's own smoother computes the loss. It shifts labels only for classes that it knows by name.
    """
    inner: object = getattr(model, "get_base_model", lambda: model)()  # PEFT
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    if is_smoothed:
        return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None))
    if loss is not None:
        return loss is ForCausalLMLoss
    is_causal = any(base.__name__.endswith("ForCausalLM") for base in type(inner).__mro__)
    return True if is_causal or find_loss_function(inner) is ForCausalLMLoss else None


def list_names(model: object) -> set[str]:
    """Returns the names and texts in the code of a model's ``forward``, in its class and its bases."""
    forwards = [vars(base).get("forward") for base in type(model).__mro__]
    codes = [inspect.unwrap(forward).__code__ for forward in forwards if inspect.isfunction(forward)]
    parts = (part for code in codes for part in (*code.co_varnames, *code.co_names, *code.co_consts))
    return {part for part in parts if isinstance(part, str)}


def find_loss_function(model: object) -> FunctionType | None:
    """Returns the loss of transformers that a model's ``forward`` calls, or None. For a class whose name tells no loss, such as
    GPT-2's, that is the causal one.
    """
    return getattr(model, "loss_function", None) if "loss_function" in list_names(model) else None


def predicts_first_label(model: object) -> bool:
    """Returns whether virtual tokens precede each row and predict its first label too, as in PEFT's prompt and P-tuning."""
    config: object = getattr(model, "active_peft_config", None)
    kind: object = getattr(config, "peft_type", None)
    # These types have no virtual tokens in the row, or have their own loss.
    return bool(getattr(config, "is_prompt_learning", False)) and kind not in ("PREFIX_TUNING", "CARTRIDGE", "CPT")


def make_counting_options(
    model: object, collator: object, *, is_packed: bool, is_smoothed: bool = False
) -> dict[str, object]:
    """Returns arguments of `odb_ref.torch.ODBDataLoader` that make it count like model and collator."""
    options: dict[str, object] = {}
    is_shifted = predicts_next_token(model, is_smoothed=is_smoothed)
    if is_shifted is not None:
        options["causal_shift"] = is_shifted and (is_packed or not predicts_first_label(model))
    if getattr(getattr(model, "config", None), "ctc_loss_reduction", None) == "mean":
        options["scaling"] = "samples"
    multiple = getattr(collator, "pad_to_multiple_of", None)
    if multiple and not is_packed:
        options["length_fn"] = CollatedLength(multiple)
    return options


def choose_layout(collator: object, loader: Mapping[str, object]) -> dict[str, object]:
    """Returns the packed layout if the collator lays samples end to end, otherwise nothing.

    Raises: UsageError when the loader's arguments ask for another layout.
    """
    if "Flattening" not in type(collator).__name__:
        return {}
    if loader.get("layout", "packed") != "packed":
        raise UsageError(
            f"{type(collator).__name__} lays samples end to end, but layout={loader['layout']!r} counts padding: pass "
            "layout='packed', or pass a collator that pads"
        )
    return {"layout": "packed"}


def has_pairs(dataset: object) -> bool:
    """Returns whether a data set has preference pairs. For a stream, its column names decide."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        return is_pair(dict.fromkeys(names, ()))
    try:
        return is_pair(dataset[0])  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        return False


def warn_of_shards(dataset: object, world_size: int) -> None:
    """Warns if the shards of a stream are distributed to ranks, where a plain Trainer distributes samples."""
    shards = getattr(dataset, "num_shards", 1)
    if world_size > 1 and shards % world_size == 0:
        warnings.warn(
            f"each of {world_size} ranks reads its own of {shards} shards, but in a plain Trainer rank 0 reads all and deals "
            "out the samples. With accelerator_config={'dispatch_batches': False} a plain Trainer's updates hold the same "
            "samples",
            RuntimeWarning,
            stacklevel=4,
        )


def take_share(
    dataset: Dataset[object], args: TrainingArguments, shard: object, *, prepared: object = None
) -> Dataset[object]:
    """Returns the part of a Trainer's data set that an `odb_ref.torch.ODBDataLoader` should read on this rank.

    A map-style data set is returned whole, because the loader divides it; for a stream this is the rank's part. A stream of the
    datasets package that the user has not divided is divided as in the data set of the ``prepared`` loader, if Accelerate has
    given whole shards to ranks there, and otherwise with the package's own function. ``shard`` is the loader's option.

    Raises: UsageError when ranks would read the same samples, as far as can be told.
    """
    is_whole = isinstance(dataset, IterableDataset) and getattr(dataset, "_distributed", None) is None
    if args.world_size == 1 or shard == "given" or not is_whole:
        return dataset
    if not type(dataset).__module__.startswith("datasets."):
        raise UsageError(
            f"{type(dataset).__name__} is iterable, so each of {args.world_size} ranks reads what it is given, and may be "
            "given the same samples as the others. Make each rank yield its own samples, and pass "
            "ODBOptions(loader={'shard': 'given'})"
        )
    if prepared is not dataset and isinstance(prepared, type(dataset)):
        return prepared
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    share: Dataset[object] = split(dataset, rank=args.process_index, world_size=args.world_size)
    return share


def tells_epoch(prepared: object, world_size: int) -> bool:
    """Returns whether a loader of Accelerate tells its data set the epoch. On several ranks it may tell a sampler instead."""
    is_told = hasattr(getattr(find_batch_sampler(prepared), "sampler", None), "set_epoch")
    return hasattr(prepared, "set_epoch") and not (is_told and world_size > 1)


def is_shuffled(prepared: DataLoader[object]) -> bool:
    """Returns True if the Trainer's own loader reads the data set in random order.

    Raises: UsageError when it does not read each sample of the data set once.
    """
    inner = find_batch_sampler(prepared)
    sampler: object = getattr(inner, "sampler", None)
    if type(inner) is not BatchSampler or not lists_all(sampler, prepared.dataset):
        name = type(inner if sampler is None else sampler).__name__
        raise UsageError(
            f"{name} chooses which samples the Trainer reads, and only update_samples='plain' follows it: set that, or pass "
            "ODBOptions(loader={'sampler': ...}), or {'shuffle': ...} to read each sample once"
        )
    return not isinstance(sampler, SequentialSampler)
