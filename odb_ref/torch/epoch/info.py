"""What a trainer learns about a step, and the weight that makes the average over ranks exact. Spec: R4.5 (WEIGHT).

The mean over a batch without supervised tokens is 0/0, and no weight makes NaN harmless: DDP would spread it to every rank.
So `StepInfo.scale` treats such a loss as zero. In this case the gradient of ``cross_entropy`` with ``ignore_index`` is zero.
But the gradient of a hand-written mean, ``(loss * mask).sum() / mask.sum()``, is NaN whatever happens to the loss. Divide by
``mask.sum().clamp(min=1)`` instead, or pass the logits to `StepInfo.scale` too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Never

import torch

from odb_ref.core.batching.weighting import Weighting

RENAMED: Final = {"is_window_end": "is_update_end", "window_supervised": "update_supervised"}
"""Attributes renamed since earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """Describes a batch. ``local_*`` counts this rank's batch, ``global_*`` the step on all ranks."""

    loss_scale: float
    """Multiply the loss by this before ``backward``: see `scale`."""
    step: int
    """Counts the steps of the epoch from 0, identically on all ranks. In the free mode the count begins again at 0 when other
    ranks or settings resume an epoch; so does ``update``."""
    round: int
    epoch: int
    is_idle: bool
    """True if this rank has nothing to train on. The batch, if any, is a replay with loss scale 0."""
    is_last: bool
    """True for the last step of a complete epoch. An aborted epoch has no last step on any rank."""
    is_update_end: bool
    """True if this step completes an update, so that the optimizer should step."""
    update: int
    """Counts the optimizer updates of the epoch from 0."""
    local_samples: int
    local_tokens: int
    local_supervised: int
    padded_tokens: int
    """Tokens of the local batch, including padding; assumes that it is packed, or padded to its longest sample."""
    global_samples: int
    global_tokens: int
    global_supervised: int
    update_supervised: int
    """Supervised tokens of the whole update, on all ranks."""
    update_samples: int
    """Samples of the whole update, on all ranks."""
    update_tokens: int
    """Tokens of the whole update, on all ranks, as lengths count them: without padding."""
    emitted_samples: int
    """Samples of this epoch up to and including this step, on all ranks."""
    progress: float | None
    """The share of the epoch's samples emitted so far, on this rank or on all; None if the total is unknown. Samples set
    aside are never emitted, so with them progress ends below 1. It also does when a quota is met first."""
    world_size: int
    local_costs: tuple[int, ...] = ()
    """What the local batch uses of each further resource. 0 in an idle step, even if the replayed batch uses some."""
    global_costs: tuple[int, ...] = ()
    """What the step uses of each further resource over all ranks; the same on every rank, and 0 if no rank uses any. Run a part
    of the model with its own collectives (a vision tower) on every rank if this is above 0."""
    sample_ids: tuple[int, ...] = ()
    """The samples of the local batch, in batch order, as indices in the data set. For an iterable data set, or a sampler that
    lists other keys, they are places in what this rank reads. Empty in an idle step."""
    weighting: Weighting = field(default_factory=Weighting)
    """The rule that determines ``loss_scale``."""
    quarantined_samples: int = 0
    """Bad samples set aside on this rank in this epoch so far, including those read ahead."""

    if not TYPE_CHECKING:  # a type checker must see only the names that exist

        def __getattr__(self, name: str) -> Never:
            if (new := RENAMED.get(name)) is not None:
                raise AttributeError(f"StepInfo.{name} is {new} now")
            raise AttributeError(f"StepInfo has no attribute {name!r}")

    def scale(self, loss: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the loss times ``loss_scale``, for ``backward``. Without a mean in the batch it is zero, still in the graph.

        A batch has no mean if it holds no supervised token: an idle step, or prompts only. With ``logits``, or any other output
        of the model, a zero weight takes the loss out of the graph, so that its own gradient does not matter. The output must
        depend on all parameters that the loss does, or DDP needs ``find_unused_parameters``. Spec: R4.5.
        Preserves: WEIGHT.
        """
        if not self.local_supervised:
            if logits is not None and not self.loss_scale:
                loss = logits.sum()
            loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))
        return loss * self.loss_scale
