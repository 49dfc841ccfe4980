"""Differences in earlier versions of transformers, all handled in this module. The oldest version tested is 4.56."""

from __future__ import annotations

import inspect
import math
from typing import Final

from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from odb_ref.torch.reading.counting import count_supervised


def compute_split(trainer: Trainer) -> int:
    """Returns the number of ranks among which a sample is split. Before 5.0 a Trainer does not know all ways to split."""
    sizes = [getattr(trainer, name, None) for name in ("get_sp_size", "get_cp_size", "get_tp_size")]
    return math.prod(size() for size in sizes if size is not None)


def get_sampling(args: TrainingArguments) -> str:
    """Returns ``train_sampling_strategy``, which was a switch before 5.2."""
    given: str | None = getattr(args, "train_sampling_strategy", None)
    return given or ("group_by_length" if args.group_by_length else "random")


HAS_TOKEN_COUNT: Final = hasattr(Trainer, "_track_num_input_tokens")
"""False before 5.3, where the loop itself counts input tokens, and counts none for an update."""


SMOOTHER_COUNTS: Final = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
"""Whether a smoothed loss is divided by the labels of the update. Earlier versions, such as 5.6, divide by those of its
micro-batch, and the Trainer adds up these means."""


def passes_number(trainer: Trainer) -> bool:
    """Returns whether in a plain Trainer the loss is divided by the number of labels in the update."""
    return trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None


def counts_first_labels(trainer: Trainer) -> bool:
    """Returns whether the Trainer's divisor counts its samples' first labels too, which nothing predicts. This is so before
    5.10, and if the model's class does not tell its loss by name, as GPT-2's. A model that does not get the number takes a mean
    itself, and so does an earlier smoother.
    """
    is_mean = trainer.label_smoother is not None and not SMOOTHER_COUNTS
    return passes_number(trainer) and not is_mean and not getattr(trainer, "_loss_shifts_labels", False)


def compute_predicted_share(labels: object) -> float:
    """Returns the share of a batch's counted labels that is predicted: all except the first of each row."""
    counted = count_supervised(labels, is_shifted=False) if isinstance(labels, Tensor) else None
    return (count_supervised(labels, is_shifted=True) or 0) / counted if counted else 1.0
