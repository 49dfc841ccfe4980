"""What a trainer learns of a step, and the weight that makes the average over ranks exact. Spec: R4.5 (WEIGHT).

The mean over a batch without a supervised token is 0/0, and no weight makes NaN harmless: DDP would spread it to every rank.
`StepInfo.scale` therefore takes such a loss for zero. ``cross_entropy`` with ``ignore_index`` has a zero gradient there; that
of a mean of your own (``(loss * mask).sum() / mask.sum()``) is NaN whatever becomes of the loss: divide by
``mask.sum().clamp(min=1)``, or give `StepInfo.scale` the logits too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Never

import torch

from odb_ref.core.batching.weighting import Weighting

RENAMED: Final = {"is_window_end": "is_update_end", "window_supervised": "update_supervised"}
"""Attributes of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What belongs to a batch. ``local_*`` counts this rank's batch, ``global_*`` the step on all ranks."""

    loss_scale: float
    """Multiply the loss by this before ``backward``: see `scale`."""
    step: int
    """Counts the steps of the epoch from 0, alike on all ranks."""
    round: int
    epoch: int
    is_idle: bool
    """True when this rank has nothing to train on: the batch, if any, is a replay with loss scale 0."""
    is_last: bool
    """True for the last step of the epoch, if it is complete: one that is broken off has none, on any rank."""
    is_update_end: bool
    """True when the update ends with this step: time for the optimizer."""
    update: int
    """Counts the optimizer updates of the epoch from 0."""
    local_samples: int
    local_tokens: int
    local_supervised: int
    padded_tokens: int
    """Tokens of the local batch, padding included, if it is padded to its longest sample, or packed."""
    global_samples: int
    global_tokens: int
    global_supervised: int
    update_supervised: int
    """Supervised tokens of the whole update, on all ranks."""
    update_samples: int
    """Samples of the whole update, on all ranks."""
    emitted_samples: int
    """Samples of this epoch up to this step, on all ranks."""
    progress: float | None
    """Share of the epoch's samples emitted up to this step, on this rank or on all; None when the total is unknown. Those
    set aside are never emitted: with them it ends below 1, as it does when a quota is met first."""
    world_size: int
    local_costs: tuple[int, ...] = ()
    """What the local batch uses of each further resource: 0 in an idle step, also where the batch is a replay that has some."""
    global_costs: tuple[int, ...] = ()
    """What the step uses of each further resource on all ranks: 0 where no rank has any, the same on every rank. A part of the
    model with collectives of its own (a vision tower) is to run where this is above 0, on every rank."""
    sample_ids: tuple[int, ...] = ()
    """Which samples the local batch holds, in its order: their indices in the data set, or, where the sampler lists other keys
    and for an iterable data set, their places in what this rank reads. None in an idle step."""
    weighting: Weighting = field(default_factory=Weighting)
    """What ``loss_scale`` goes by."""
    quarantined_samples: int = 0
    """Bad samples set aside on this rank in this epoch so far, those read ahead included."""

    if not TYPE_CHECKING:  # a type checker knows the names there are

        def __getattr__(self, name: str) -> Never:
            if (new := RENAMED.get(name)) is not None:
                raise AttributeError(f"StepInfo.{name} is {new} now")
            raise AttributeError(f"StepInfo has no attribute {name!r}")

    def scale(self, loss: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the loss times ``loss_scale``, for ``backward``; zero, and still part of the graph, where the batch has
        no mean.

        That is where it holds no supervised token: an idle step, or prompts only. With ``logits``, or any other output of the
        model, a zero weight leaves the loss out of the graph, so that its own gradient does not matter. Spec: R4.5.
        Preserves: WEIGHT.
        """
        if not self.local_supervised:
            if logits is not None and not self.loss_scale:
                loss = logits.sum()
            loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))
        return loss * self.loss_scale
