"""`odb.callbacks`: the one call that sets a Trainer up."""

from __future__ import annotations

from transformers import Trainer

from odb_ref.compat.config import LossScalingMode
from odb_ref.compat.dataloader import ODBDataLoader
from odb_ref.compat.integrations.hf import AnyLoader, ODBTrainerBridge, configure_trainer
from odb_ref.torch import UsageError

__all__ = ["setup_odb_training"]


def setup_odb_training(  # noqa: PLR0917 (as the original has them)
    trainer: Trainer,
    dataloader: AnyLoader,
    max_input_length: int,
    loss_scaling: LossScalingMode = False,
    loss_scaling_approx: bool = True,
    join_mode: bool = True,
) -> ODBTrainerBridge:
    """Makes an `odb_ref.integrations.hf.ODBTrainer` of a Trainer, over a DataLoader, for the epochs its arguments say.

    Raises: UsageError when the loader is an `ODBDataLoader` already, and as `configure_trainer`.
    """
    if isinstance(dataloader, ODBDataLoader):
        raise UsageError("setup_odb_training takes a DataLoader that odb.apply was not called on")
    return configure_trainer(
        trainer,
        dataloader=dataloader,
        max_steps_policy="overwrite",
        max_input_length=max_input_length,
        loss_scaling=loss_scaling,
        loss_scaling_approx=loss_scaling_approx,
        join_mode=join_mode,
    )
