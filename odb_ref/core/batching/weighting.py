"""The factors for the loss of each step that make the average over ranks exact. Spec: R4.5. Preserves: WEIGHT.

There are W ranks. Rank r has n_rj supervised tokens in micro-step j of an update; N is their sum over ranks and micro-steps.
The trainer averages gradients over ranks (DDP, FSDP) and adds them up over micro-steps. Then the factors are:

=========================  ====================================  ==================================
loss of a batch            ``exact``                             ``samples`` (m_rj samples of M)
=========================  ====================================  ==================================
mean over its tokens       ``n_rj * W / N``                      ``m_rj * W / M``
sum over its tokens        ``W / N``                             ``m_rj * W / (M * n_rj)``
=========================  ====================================  ==================================

They make the gradient that of the mean over all N tokens (or of the mean over samples of the batches' means). A trainer that
itself divides the loss by the k micro-steps needs ``k`` times that: see ``is_divided_by_steps``. An idle step weighs 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from odb_ref.core.types import StepCounts


class LossScaling(StrEnum):
    """What the average over ranks should equal."""

    EXACT = "exact"
    """The mean over all supervised tokens of the update."""
    SAMPLES = "samples"
    """The mean over all samples of the update, where each sample has the mean loss of its batch."""
    NONE = "none"
    """No correction: every step weighs 1, and an idle step 0."""


class LossReduction(StrEnum):
    """How the trainer's loss function combines the tokens of a batch."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How to weigh a step's loss; part of the loader's configuration, and equal on all ranks."""

    scaling: LossScaling = LossScaling.EXACT
    reduction: LossReduction = LossReduction.MEAN
    accumulation_steps: int = 1
    is_divided_by_steps: bool = False

    @property
    def needs_supervised(self) -> bool:
        """True if the weights depend on how many tokens carry loss."""
        match self.scaling:
            case LossScaling.EXACT:
                return True
            case LossScaling.SAMPLES:
                return self.reduction is LossReduction.SUM
            case LossScaling.NONE:
                return False

    def compute_scale(self, local: StepCounts, update: StepCounts, world_size: int) -> float:
        """Returns the factor for the loss of a batch with counts ``local`` in an update with counts ``update``."""
        if not local.samples:
            return 0.0
        factor = float(self.accumulation_steps if self.is_divided_by_steps else 1)
        match self.scaling:
            case LossScaling.NONE:
                return 1.0
            case LossScaling.EXACT:
                share = world_size / update.supervised if update.supervised else 0.0
                return factor * share * (local.supervised if self.reduction is LossReduction.MEAN else 1)
            case LossScaling.SAMPLES:
                share = local.samples * world_size / update.samples
                if self.reduction is LossReduction.MEAN:
                    # Which tokens carry loss may be unknown: a mean over none is left out by the code that sees it.
                    return factor * share
                return factor * (share / local.supervised) if local.supervised else 0.0
