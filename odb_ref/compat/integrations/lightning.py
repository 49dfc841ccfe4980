"""`odb.integrations.lightning`: a module's training step gets plain batches, and its losses are weighted on return."""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "lightning", extra="lightning")

import inspect
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Self, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from odb_ref.compat.config import LossScalingMode
from odb_ref.compat.dataloader import ODBDataLoader, apply
from odb_ref.compat.handle import ODBHandle
from odb_ref.compat.integrations.bridge import Bridge, BridgeState
from odb_ref.compat.step_info import ODBStepInfo, pop_step_info
from odb_ref.torch import UsageError

ODBLightningBridgeState = BridgeState


@dataclass(slots=True)
class ODBLightningBridge(Bridge):
    """For a training step. Stores the progress in the module too."""

    module: LightningModule
    handle: ODBHandle
    sample_budget: int | None = None
    loss_scaling: LossScalingMode = None
    state: BridgeState = field(default_factory=BridgeState)

    def consume_batch(self, batch: object) -> ODBStepInfo:
        """Removes a step's information from its batch, counts its samples, and returns the information."""
        info = Bridge.consume_batch(self, batch)
        self.module.odb_emitted_samples, self.module.odb_last_step_info = self.state.emitted_samples, info
        return info


def configure_lightning_module(
    module: LightningModule,
    *,
    dataloader: DataLoader[object] | ODBDataLoader[object] | None = None,
    handle: ODBHandle | None = None,
    sample_budget: int | None = None,
    wrap_training_step: bool = True,
    loss_scaling: LossScalingMode = None,
    **apply_kwargs: object,
) -> ODBLightningBridge:
    """Returns the bridge of a module, whose ``training_step`` weights its loss from now on.

    ``dataloader`` is turned into an `ODBDataLoader` if it is not one yet. Lightning divides losses by
    ``accumulate_grad_batches``, so over an update the gradient is the mean of the micro-steps' exact ones. With
    `odb_ref.integrations.lightning` it is exact over the update.

    Raises: UsageError like `ODBDataLoader`, when updates have a fixed size, and when there is neither a loader nor a handle.
    """
    if isinstance(dataloader, ODBDataLoader):
        handle = ODBHandle(dataloader.odb_config) if handle is None else handle
    elif dataloader is not None:
        handle = apply(dataloader, loss_scaling=loss_scaling, **apply_kwargs)  # type: ignore[arg-type]
    if isinstance(dataloader, ODBDataLoader) and dataloader.loader.update_samples is not None:
        raise UsageError(
            "update_samples needs odb_ref.integrations.lightning: here Lightning would step inside updates"
        )
    if handle is None:
        raise UsageError("configure_lightning_module needs a dataloader, or the handle of one that apply has changed")
    bridge = ODBLightningBridge(module, handle, sample_budget, loss_scaling)
    module.odb_bridge, module.odb_emitted_samples, module.odb_last_step_info = bridge, 0, None
    if wrap_training_step:
        module.training_step = _wrap(module.training_step, bridge)
    return bridge


TrainingStep = Callable[[object, int], object]


def _wrap(training_step: TrainingStep, bridge: ODBLightningBridge) -> TrainingStep:
    takes_index = len(inspect.signature(training_step).parameters) > 1
    plain = cast(Callable[[object], object], training_step)

    def step(batch: object, batch_idx: int) -> object:
        info = bridge.consume_batch(batch)
        result = training_step(batch, batch_idx) if takes_index else plain(batch)
        if isinstance(result, Tensor):
            return bridge.scale_loss(result, info)
        loss: object = result.get("loss") if isinstance(result, MutableMapping) else None
        if isinstance(result, MutableMapping) and isinstance(loss, Tensor):
            result["loss"] = bridge.scale_loss(loss, info)
        elif result is not None:
            raise UsageError(f"training_step returned {type(result).__name__}, expected a loss or a mapping with one")
        return result

    return step


class ODBLightningCallback(Callback):  # type: ignore[misc]
    """Ends training with the step that reaches ``sample_budget`` samples, as counted by `configure_lightning_module` or
    `ODBLightningMixin`.

    Raises: UsageError when the module does not count samples.
    """

    def __init__(self, sample_budget: int) -> None:
        self.sample_budget = sample_budget

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the module counts samples. Raises: UsageError when it does not."""
        self._count(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Asks Lightning to stop, on all ranks at the same step."""
        if self._count(pl_module) >= self.sample_budget:
            trainer.should_stop = True

    def _count(self, module: LightningModule) -> int:
        count = getattr(module, "odb_emitted_samples", None)
        if not isinstance(count, int):
            raise UsageError("a sample budget needs a module of configure_lightning_module, or with ODBLightningMixin")
        return count


class ODBLightningMixin:
    """For modules that take a step's information out of its batch themselves."""

    odb_loss_scaling: LossScalingMode = "auto"
    odb_last_step_info: ODBStepInfo | None = None
    odb_emitted_samples: int = 0

    def set_odb_handle(self, handle: ODBHandle, *, loss_scaling: LossScalingMode = None) -> Self:
        """Adopts the loader's way to weight losses."""
        self.odb_loss_scaling = handle.config.loss_scaling if loss_scaling is None else loss_scaling
        return self

    def consume_odb_batch(self, batch: object) -> ODBStepInfo:
        """Removes a step's information from its batch, counts its samples, and returns the information."""
        info = pop_step_info(batch, loss_scaling=self.odb_loss_scaling)
        self.odb_emitted_samples += info.all_samples_this_step
        self.odb_last_step_info = info
        return info

    def scale_odb_loss(self, loss: Tensor, info: ODBStepInfo | None = None) -> Tensor:
        """Returns the weighted loss, by ``info`` or by the last result of `consume_odb_batch`.

        Raises: UsageError when no batch was consumed.
        """
        known = self.odb_last_step_info if info is None else info
        if known is None:
            raise UsageError("scale_odb_loss: call consume_odb_batch(batch) first")
        return known.scale(loss)
