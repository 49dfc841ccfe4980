"""Losses that a plain Trainer weights differently, and losses that cannot be weighted correctly."""

from __future__ import annotations

import inspect
import warnings
from typing import Final

from torch import nn
from transformers import TrainingArguments

from odb_ref.integrations.hf.data import find_loss_function, has_pairs, list_names, predicts_first_label
from odb_ref.integrations.hf.steps import SteppingTrainer
from odb_ref.integrations.hf.versions import SMOOTHER_COUNTS, counts_first_labels, passes_number
from odb_ref.torch import UsageError
from odb_ref.torch.loop import count_pairs

_UNPAIRED_LOSSES: Final = {
    "sft": "a mean over tokens",
    "aot": "made of the batch in sorted order",
    "aot_unpaired": "made of the batch in sorted order",
}
"""The losses of TRL's `DPOTrainer` that are not means over pairs, with a description."""


def check_pair_loss(args: TrainingArguments, dataset: object) -> None:
    """Refuses a loss that does not add up to that of one process if it is weighted by pairs."""
    kinds: object = getattr(args, "loss_type", "")
    said = kinds if isinstance(kinds, list | tuple) else [kinds]
    found = [(f"loss_type {kind!r}", what) for kind, what in _UNPAIRED_LOSSES.items() if kind in said]
    if getattr(args, "rpo_alpha", None) is not None:
        found.append(("rpo_alpha", "a mean over tokens"))
    if found and has_pairs(dataset):
        name, what = found[0]
        raise UsageError(
            f"{name}: this loss is {what}, so batches of varying size do not add up to the loss of one process. If a mean of "
            "the batches' losses, weighted by their pairs, will do, pass loss=Loss(scaling='samples') to the loader"
        )


def _find_mean(trainer: SteppingTrainer) -> str:
    """Returns what takes the mean over a micro-batch, although it is passed num_items_in_batch, or an empty string."""
    is_own = any(
        "compute_loss" in vars(base) and base.__module__.partition(".")[0] not in ("transformers", "odb_ref")
        for base in type(trainer).__mro__
    )
    if is_own or trainer.compute_loss_func is not None:
        return ""
    if trainer.label_smoother is not None:
        return "" if SMOOTHER_COUNTS else "label_smoothing_factor"
    # A model may pass the number on to one inside it.
    return "" if any(map(_divides, trainer.model.modules())) else f"{type(trainer.model).__name__} takes a mean itself"


def _divides(module: nn.Module) -> bool:
    """Returns True if a model seems to divide its loss by num_items_in_batch, or the loss of transformers that it calls."""
    loss = find_loss_function(module)
    is_passed = loss is not None and "num_items_in_batch" in inspect.signature(loss).parameters
    return is_passed or "num_items_in_batch" in list_names(module)


def warn_of_other_losses(trainer: SteppingTrainer) -> None:
    """Warns about settings with which a plain Trainer's losses differ from those of the same updates here."""
    micro_batches = trainer.args.gradient_accumulation_steps * trainer.args.world_size
    is_paired = trainer.odb.count is count_pairs
    is_counted = not is_paired and passes_number(trainer)
    said = []
    if micro_batches > 1 and not is_counted:
        why = "a loss of pairs takes no" if is_paired else f"{type(trainer.model).__name__} is not passed"
        said.append(
            f"{why} num_items_in_batch, so a plain Trainer weights the mean losses of an update's {micro_batches} "
            "micro-batches equally. ODBTrainer weights each by the number of items that it is the mean of"
        )
    if micro_batches > 1 and is_counted and (why := _find_mean(trainer)):
        said.append(
            f"{why}: a plain Trainer of this version adds up the mean losses of an update's {micro_batches} micro-batches. "
            "ODBTrainer's loss is the mean over the update, so loss and grad_norm are about as many times smaller"
        )
    if trainer.args.neftune_noise_alpha:
        said.append(
            "neftune_noise_alpha: the noise is divided by the square root of a row's padded length. Rows have less padding "
            "with ODBTrainer, so the noise is larger than a plain Trainer's: lower the value to keep its size"
        )
    if getattr(getattr(trainer.model, "config", None), "output_router_logits", False):
        text = "output_router_logits: the routers' loss is per micro-batch, so it depends on how an update is divided"
        is_of_trl = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
        if micro_batches > 1 and is_counted and not is_of_trl:  # otherwise it is divided by their number
            text += (
                f"; a plain Trainer adds it for each of {micro_batches} micro-batches, ODBTrainer once for an update: raise "
                "router_aux_loss_coef to keep its weight"
            )
        said.append(text)
    if is_counted and predicts_first_label(trainer.model) and not counts_first_labels(trainer):
        said.append(
            "virtual tokens predict the first label of each row too, but a plain Trainer does not count that label in the "
            "number it divides by. Its loss and grad_norm are larger by the ratio of the number of labels with it to the "
            "number without it"
        )
    for text in said:
        warnings.warn(text, RuntimeWarning, stacklevel=5)
