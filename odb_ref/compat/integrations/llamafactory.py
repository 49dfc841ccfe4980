"""`odb.integrations.llamafactory`: finds settings in LLaMA-Factory's arguments; `odb.integrations.hf` does the rest.

Needs only `transformers`: LLaMA-Factory's trainers are Trainers, and its arguments are read by name.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "transformers", "accelerate", extra="transformers")

from typing import Final, Literal

from transformers import Trainer

from odb_ref.compat.config import LossScalingMode
from odb_ref.compat.integrations import hf
from odb_ref.compat.integrations.hf import AnyLoader, MaxStepsPolicy, ODBTrainerBridge, SchedulerProgress

_NAMES: Final = {
    "token_budget": ("odb_token_budget", "odb_max_input_length"),
    "loss_scaling": ("odb_loss_scaling",),
    "join": ("odb_join", "odb_join_mode"),
    "buffer_size": ("odb_buffer_size",),
    "max_patches": ("odb_max_patches",),
}


def _find_settings(*arguments: object) -> dict[str, object]:
    found = {}
    for setting, names in _NAMES.items():
        values = [getattr(item, name, None) for item in arguments if item is not None for name in names]
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[setting] = value
    return found


def configure_trainer(
    trainer: Trainer,
    *,
    train_dataloader: AnyLoader | None = None,
    dataloader: AnyLoader | None = None,
    training_args: object = None,
    data_args: object = None,
    finetuning_args: object = None,
    token_budget: int | None = None,
    loss_scaling: LossScalingMode = None,
    join: bool | None = None,
    trainer_integration: Literal["package", "framework"] = "package",
    wrap_compute_loss: bool = True,
    max_steps_policy: MaxStepsPolicy = "overwrite",
    scheduler_progress: SchedulerProgress = "samples",
    require_batch_size_one: bool = True,
    **options: object,
) -> ODBTrainerBridge:
    """Turns a LLaMA-Factory Trainer into an `odb_ref.integrations.hf.ODBTrainer`.

    Settings that are not given are read from the arguments, as ``odb_token_budget``, ``odb_loss_scaling`` and ``odb_join``.
    With ``trainer_integration="framework"`` the Trainer itself takes a step's information out of its batch.

    Raises: UsageError, like `odb_ref.compat.integrations.hf.configure_trainer`.
    """
    given = {"token_budget": token_budget, "loss_scaling": loss_scaling, "join": join}
    settings = {name: value for name, value in given.items() if value is not None}
    found = _find_settings(finetuning_args, data_args, training_args, trainer.args)
    return hf.enable_odb(
        trainer,
        train_dataloader=dataloader if train_dataloader is None else train_dataloader,
        max_steps_policy=max_steps_policy,
        scheduler_progress=scheduler_progress,
        wrap_compute_loss=wrap_compute_loss and trainer_integration == "package",
        **{**found, **settings, **options},  # type: ignore[arg-type]
    )


enable_odb = configure_trainer
"""The same function. The loader reports errors that the release's ``enable_odb`` checks for beforehand."""
