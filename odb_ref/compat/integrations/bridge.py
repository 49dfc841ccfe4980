"""Shared by the bridges of loops and modules: takes a step's information out of its batch, counts, and weights losses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from odb_ref.compat.config import LossScalingMode
from odb_ref.compat.handle import ODBHandle
from odb_ref.compat.step_info import ODBStepInfo, pop_step_info
from odb_ref.torch import UsageError


@dataclass(slots=True)
class BridgeState:
    """The progress of training."""

    emitted_samples: int = 0
    optimizer_steps: int = 0
    last_step_info: ODBStepInfo | None = None


class Bridge:
    """For a training step: call `consume_batch` before the model sees a batch, and `scale_loss` before its backward pass."""

    __slots__ = ()
    handle: ODBHandle
    sample_budget: int | None
    loss_scaling: LossScalingMode
    state: BridgeState

    def consume_batch(self, batch: object) -> ODBStepInfo:
        """Removes a step's information from its batch, counts its samples, and returns the information."""
        mode = self.handle.config.loss_scaling if self.loss_scaling is None else self.loss_scaling
        info = pop_step_info(batch, loss_scaling=mode)
        self.state.emitted_samples += info.all_samples_this_step
        self.state.last_step_info = info
        return info

    def scale_loss(self, loss: Tensor, info: ODBStepInfo | None = None) -> Tensor:
        """Returns the weighted loss, by ``info`` or by the last result of `consume_batch`.

        Raises: UsageError when no batch was consumed.
        """
        known = self.state.last_step_info if info is None else info
        if known is None:
            raise UsageError("scale_loss: call consume_batch(batch) before the model sees it")
        return known.scale(loss)

    def mark_optimizer_step(self) -> None:
        """Counts an update."""
        self.state.optimizer_steps += 1

    @property
    def should_stop(self) -> bool:
        """True if the sample budget is met, on all ranks at the same step."""
        return self.sample_budget is not None and self.state.emitted_samples >= self.sample_budget
