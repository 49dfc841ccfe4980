"""`odb.utils`: the release's helpers that count samples and scale losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from odb_ref.compat.constants import LOCAL_BATCH_SIZE_KEY, LOCAL_TOKENS_KEY, TOTAL_BATCH_SIZE_KEY, TOTAL_TOKENS_KEY
from odb_ref.compat.step_info import find_step

__all__ = ["compute_batch_size", "get_input_length", "get_n_patches", "is_valid_batch", "scale_loss"]


def scale_loss(loss: Tensor, batch_or_local_bs: object = 0, total_batch_size: int = 0, world_size: int = 0) -> Tensor:
    """Returns the weighted loss, by what a batch carries (its tokens, otherwise its samples), or by given numbers of samples.

    Returns the loss unchanged if these numbers are 0.
    """
    if isinstance(batch_or_local_bs, Mapping):
        step = find_step(batch_or_local_bs)
        if step is not None:
            return step.scale(loss)
        own, whole = (LOCAL_TOKENS_KEY, TOTAL_TOKENS_KEY)
        if own not in batch_or_local_bs or whole not in batch_or_local_bs:
            own, whole = (LOCAL_BATCH_SIZE_KEY, TOTAL_BATCH_SIZE_KEY)
        local, total = int(batch_or_local_bs.get(own, 0)), int(batch_or_local_bs.get(whole, 0))
        world_size = dist.get_world_size() if dist.is_initialized() else 1
    else:
        local, total = int(str(batch_or_local_bs)), total_batch_size
    return loss * (local * world_size / total) if total and world_size else loss


def get_input_length(data: Mapping[str, object]) -> int:
    """Returns the tokens of a sample, or 0 without ``input_ids``, which may be a list, a vector, or a matrix with one row."""
    match data.get("input_ids"):
        case Tensor() as ids:
            return ids.shape[-1] if ids.ndim in (1, 2) and ids.numel() else 0
        case list() | tuple() as ids:
            return len(ids)
        case _:
            return 0


def get_n_patches(data: Mapping[str, object]) -> int:
    """Returns the number of patches that a sample states, or 0."""
    return int(torch.as_tensor(data.get("odb_n_patches") or 0))


def is_valid_batch(batch: Sequence[Mapping[str, object]]) -> bool:
    """Returns whether there is at least one sample, and none without tokens."""
    return bool(batch) and all(map(get_input_length, batch))


def compute_batch_size(input_length: int, max_input_length: int, n_patches: int = 0, max_patches: int = 0) -> int:
    """Returns how many samples of this length and number of patches fit into the budgets; at least 1."""
    limits = [max_input_length // input_length] if input_length else [1]
    if n_patches > 0 and max_patches > 0:
        limits.append(max_patches // n_patches)
    return max(1, min(limits))
