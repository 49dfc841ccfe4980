"""A step's information under the names of `online-dynamic-batching`. The batch carries it until `pop_step_info`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch import distributed as dist

from odb_ref.compat.config import LossScalingMode, resolve_scaling
from odb_ref.compat.constants import (
    LOCAL_BATCH_SIZE_KEY,
    LOCAL_TOKENS_KEY,
    ODB_STEP_INFO_KEY,
    TOTAL_BATCH_SIZE_KEY,
    TOTAL_TOKENS_KEY,
)
from odb_ref.core.batching.weighting import LossScaling
from odb_ref.core.types import StepCounts
from odb_ref.torch import StepInfo, UsageError

_COUNTS: Final = (LOCAL_BATCH_SIZE_KEY, TOTAL_BATCH_SIZE_KEY, LOCAL_TOKENS_KEY, TOTAL_TOKENS_KEY)


class Carrier:
    """Carries a `StepInfo` in a batch. Frameworks that move batches to a device take dataclasses apart, but not this class."""

    __slots__ = ("info",)

    def __init__(self, info: StepInfo) -> None:
        self.info = info


@dataclass(frozen=True, slots=True)
class ODBStepInfo:
    """What a trainer needs to know about a step."""

    all_samples_this_step: int
    """Samples of the step on all ranks."""
    loss_scale: float | Tensor = 1.0
    """Multiply the loss by this; 0 in an idle step. `scale` does it, and treats a loss of 0/0 as zero."""
    step: StepInfo | None = None
    """All information about the step: see `odb_ref.StepInfo`."""

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times ``loss_scale``: see `odb_ref.StepInfo.scale`."""
        scale = float(self.loss_scale)
        return loss * scale if self.step is None else replace(self.step, loss_scale=scale).scale(loss)


def mark(batch: object, info: StepInfo) -> None:
    """Puts a step's information into its batch, if the batch is a mutable mapping."""
    if not isinstance(batch, MutableMapping):
        return
    batch[ODB_STEP_INFO_KEY] = Carrier(info)
    counts = info.local_samples, info.global_samples, info.local_tokens, info.global_tokens
    batch.update(zip(_COUNTS, map(torch.tensor, counts), strict=True))


def carries_step(batch: object) -> bool:
    """Returns whether a batch carries its step's information, in any of the possible forms."""
    return isinstance(batch, Mapping) and any(key in batch for key in (ODB_STEP_INFO_KEY, *_COUNTS))


def find_step(batch: object) -> StepInfo | None:
    """Returns the `StepInfo` that a batch carries, or None."""
    found = batch.get(ODB_STEP_INFO_KEY) if isinstance(batch, Mapping) else None
    return found.info if isinstance(found, Carrier) else found if isinstance(found, StepInfo) else None


def pop_step_info(
    batch: object, *, loss_scaling: LossScalingMode = "auto", world_size: int | None = None
) -> ODBStepInfo:
    """Removes a step's information from its batch and returns it. The batch is then as ``collate_fn`` has made it.

    ``loss_scaling`` determines how to weight the loss; ``"auto"`` follows the loader. ``world_size`` replaces the loader's, if
    a trainer averages gradients over another number of ranks. A batch of a plain DataLoader counts as one of this rank alone,
    with weight 1 and a warning.

    Numbers that others have put into the batch, under the keys of `odb.constants`, are removed and used for the weight.

    Raises: UsageError when the object is not a mapping; the release needs one too.
    """
    if not isinstance(batch, MutableMapping):
        raise UsageError(
            f"pop_step_info: a {type(batch).__name__} is not a mapping, and carries nothing: read loader.loader.steps()"
        )
    if (info := find_step(batch)) is None:
        return _pop_numbers(batch, loss_scaling, world_size)
    for key in (ODB_STEP_INFO_KEY, *_COUNTS):
        batch.pop(key, None)
    scaling = info.weighting.scaling if loss_scaling in ("auto", None) else LossScaling(resolve_scaling(loss_scaling))
    scale = info.loss_scale if scaling is info.weighting.scaling else compute_scale(info, scaling)
    if world_size is not None and scaling is not LossScaling.NONE:
        scale *= world_size / info.world_size
    return ODBStepInfo(info.global_samples, scale, info)


def _pop_numbers(batch: MutableMapping[str, object], mode: LossScalingMode, world_size: int | None) -> ODBStepInfo:
    """Removes the numbers that a batch without a `StepInfo` carries."""
    is_plain = not carries_step(batch)
    found, *values = (batch.pop(key, None) for key in (ODB_STEP_INFO_KEY, *_COUNTS))
    if isinstance(found, ODBStepInfo):
        return found
    rows = next((len(item) for item in batch.values() if isinstance(item, Tensor) and item.ndim), 0)
    if is_plain:
        warnings.warn(
            "the batch is not of an ODB loader: its samples count alone, its loss is not weighed", stacklevel=3
        )
        return ODBStepInfo(rows)
    samples, all_samples, tokens, all_tokens = (None if value is None else _read(value) for value in values)
    samples = rows if samples is None else samples
    all_samples = samples if all_samples is None else all_samples
    part, whole = tokens or 0, all_tokens or 0
    if mode in ("auto", None):
        if not (part and whole):
            part, whole = samples, all_samples
    elif resolve_scaling(mode) == "none":
        part = 0
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
    return ODBStepInfo(all_samples, part / whole * world_size if part and whole else 1.0)


def _read(value: object) -> int:
    """Returns a number, or the first of several that a collator has made from it."""
    return int(torch.as_tensor(value).reshape(-1)[0])


def compute_scale(info: StepInfo, scaling: LossScaling) -> float:
    """Returns the weight of a step's loss in its update, in a mode that differs from the loader's."""
    local = StepCounts(info.local_samples, info.local_tokens, info.local_supervised)
    update = StepCounts(info.update_samples, info.update_tokens, info.update_supervised)
    return replace(info.weighting, scaling=scaling).compute_scale(local, update, info.world_size)
