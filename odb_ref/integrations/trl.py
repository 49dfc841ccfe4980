"""TRL: turns an `SFTTrainer`, `DPOTrainer` or `RewardTrainer` into an `ODBTrainer`, according to its own arguments.

::

    trainer = SFTTrainer(model, SFTConfig(padding_free=True, max_length=None, ...), train_dataset=dataset)
    configure_trainer(trainer, token_budget=16_384)
    trainer.train()

The Trainer's arguments are read by name; TRL is not imported:

==================================  ====================================================================================
``per_device_train_batch_size``     times ``max_length`` (twice that for pairs): the token budget, if none is given
``padding_free``                    ``layout="packed"``: rows are filled here, and no sample is cut or dropped
``packing``                         refused: it fills rows before training; set ``padding_free`` alone instead
``max_length``                      a pair is as long as its collator makes it; before TRL 1.8 other data sets are cut here
``completion_only_loss``            the labels that the masks of a data set choose are counted, as the collator makes them
a vision data set                   its texts are made by the collator: ``length_fn`` and ``supervised_fn`` must be given
``loss_type``, ``rpo_alpha``        refused if a loss is not a mean over pairs, unless ``loss_scaling`` is given
==================================  ====================================================================================

Pairs are units. A batch has twice as many rows, its loss is weighted by the pairs it averages over, and no pair is separated
when memory runs out. Metrics that these Trainers gather for their logs leave out idle ranks.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "transformers", extra="trl")

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol, Unpack, runtime_checkable

from transformers import Trainer

from odb_ref.integrations.hf import ODBTrainer, enable
from odb_ref.integrations.hf.data import OF_TRL, PAIRS, CollatedLength, has_pairs
from odb_ref.integrations.hf.options import ODBOptions, TrainerArguments
from odb_ref.torch import UsageError
from odb_ref.torch.settings import check_spelling, spread

_MASK: Final = "completion_mask"
_CUT: Final = ("input_ids", "labels", _MASK, "assistant_masks")


def configure_trainer(
    trainer: Trainer, *, token_budget: int | None = None, **settings: Unpack[TrainerArguments]
) -> ODBTrainer:
    """Turns the Trainer into an `ODBTrainer`, and returns it.

    ``settings`` are further arguments of `ODBOptions` and of `ODBDataLoader`.

    Raises: UsageError when it is another Trainer, packs beforehand, or its arguments leave something necessary open.
    """
    _check_trainer(trainer)
    args = trainer.args
    if getattr(args, "packing", False):
        raise UsageError(
            "packing=True fills rows before training, and cuts or drops samples to do so: pass packing=False with "
            "padding_free=True and max_length=None, and the loader fills rows with whole samples"
        )
    check_spelling(settings)
    told = spread(settings)
    is_counted = "length_fn" in told and ("supervised_fn" in told or told.get("scaling") == "samples")
    if getattr(trainer, "_is_vision_dataset", False) and not is_counted:
        raise UsageError(
            "the collator of a vision data set makes its texts, so their tokens cannot be counted beforehand: pass "
            "batching=Batching(length_fn=), and loss=Loss(supervised_fn=) or Loss(scaling='samples')"
        )
    options: dict[str, object] = {}
    max_length: int | None = getattr(args, "max_length", None)
    multiple: int = getattr(trainer.data_collator, "pad_to_multiple_of", None) or 1
    is_paired = has_pairs(trainer.train_dataset)
    if not is_paired and not getattr(trainer, "_is_vision_dataset", False):
        _prepare(trainer)
    if getattr(trainer, "padding_free", False):
        options["layout"] = "packed"
    elif is_paired:
        options |= PAIRS | {"length_fn": CollatedLength(multiple, max_length)}
    if token_budget is None:
        if max_length is None:
            raise UsageError("max_length=None gives no bound to compute a token budget from: pass token_budget=")
        token_budget = args.per_device_train_batch_size * max_length * (2 if is_paired else 1)
    return enable(trainer, ODBOptions.from_settings({"token_budget": token_budget} | options | told))


Rows = Mapping[str, list[list[int]]]


@runtime_checkable
class _Table(Protocol):
    """A data set of `datasets`."""

    def map(self, change: Callable[[Rows], object], *, batched: bool) -> object: ...


def _prepare(trainer: Trainer) -> None:
    """Changes the data sets as TRL's collator changes each batch in versions before 1.8: the loader counts what it reads."""
    collator = trainer.data_collator
    most: int | None = getattr(collator, "max_length", None)
    is_mask_used: bool = getattr(collator, "completion_only_loss", True)
    if most is None and is_mask_used:
        return
    is_end_kept = getattr(collator, "truncation_mode", "") == "keep_end"
    kept = slice(-most, None) if most is not None and is_end_kept else slice(most)
    change = partial(_change, kept, is_mask_used)

    def prepare(dataset: object) -> object:
        return dataset.map(change, batched=True) if isinstance(dataset, _Table) else dataset

    for name in ("train_dataset", "eval_dataset"):
        given = getattr(trainer, name)
        parts = {key: prepare(part) for key, part in given.items()} if isinstance(given, dict) else prepare(given)
        setattr(trainer, name, parts)


def _change(kept: slice[int | None, int | None, None], is_mask_used: bool, rows: Rows) -> Rows:
    found = {name: [row[kept] for row in rows[name]] for name in _CUT if name in rows}
    if _MASK in found and not is_mask_used:
        found[_MASK] = [[1] * len(row) for row in found[_MASK]]
    return found


def _check_trainer(trainer: Trainer) -> None:
    """Refuses trainers that make their samples in the step, or average their loss over units that are not known here."""
    name = next((kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    if name is not None and name not in OF_TRL:
        raise UsageError(
            f"{name} is not supported ({', '.join(OF_TRL)} are), because it is not known what its loss is a mean over. If "
            "that is samples, or their tokens with a label, and each sample has input_ids, use "
            "odb_ref.integrations.hf.enable(trainer, ODBOptions(...)). A Trainer that generates what it trains on needs its "
            "own batches, and so does one whose loss compares the samples of a batch (KTO)"
        )
