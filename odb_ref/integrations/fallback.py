"""Notices a framework that runs another strategy than the one it was asked for, without a word."""

from __future__ import annotations

import os
import warnings
from typing import Final

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType

from odb_ref.torch import UsageError

_ASKED: Final = {
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
}
"""How Accelerate itself says what it was asked for, plugins included."""


def check_strategy(accelerator: Accelerator) -> None:
    """Warns when the model is replicated though it was to be sharded: Accelerate shards on accelerators only.

    Raises: UsageError when the ranks are not joined at all, so that each would train a model of its own.
    """
    found = accelerator.distributed_type
    asked = [wanted for name, wanted in _ASKED.items() if os.environ.get(name, "false").lower() == "true"]
    if found is DistributedType.NO and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f"{dist.get_world_size()} ranks are started, and Accelerate joins none of them: each would train a model of its "
            "own. Without an accelerator say Accelerator(cpu=True), or use_cpu=True"
        )
    for wanted in asked:
        if found is not wanted:
            warnings.warn(
                f"{wanted.value} was asked for, and Accelerate runs {found.value} without a word: every rank holds the whole "
                "model. Weights are the same, memory is not",
                RuntimeWarning,
                stacklevel=3,
            )
