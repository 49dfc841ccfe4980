"""What transformers says otherwise before 5.3: all that is done for it stands here. The oldest that is run is 4.56."""

from __future__ import annotations

import math
from typing import Final

from transformers import Trainer, TrainingArguments


def compute_split(trainer: Trainer) -> int:
    """Returns among how many ranks a sample is split; before 5.0 a Trainer does not know of all ways."""
    sizes = [getattr(trainer, name, None) for name in ("get_sp_size", "get_cp_size", "get_tp_size")]
    return math.prod(size() for size in sizes if size is not None)


def get_sampling(args: TrainingArguments) -> str:
    """Returns ``train_sampling_strategy``, before 5.2 a switch."""
    given: str | None = getattr(args, "train_sampling_strategy", None)
    return given or ("group_by_length" if args.group_by_length else "random")


HAS_TOKEN_COUNT: Final = hasattr(Trainer, "_track_num_input_tokens")
"""False before 5.3, where the loop itself counts input tokens, and of an update none."""
