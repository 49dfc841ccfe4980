"""`odb.integrations.hf`: turns a Trainer into an `odb_ref.integrations.hf.ODBTrainer`, in place."""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "transformers", "accelerate", extra="transformers")

import math
from collections.abc import Mapping, MutableMapping, Sized
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from odb_ref.compat.config import LossScalingMode, ODBConfig, resolve_config, split_settings
from odb_ref.compat.dataloader import ODBDataLoader, is_prepared, make_options
from odb_ref.compat.handle import ODBHandle
from odb_ref.compat.integrations.bridge import BridgeState
from odb_ref.compat.step_info import ODBStepInfo, carries_step, pop_step_info
from odb_ref.integrations.hf import enable
from odb_ref.integrations.hf.options import ODBOptions
from odb_ref.torch import UsageError
from odb_ref.torch.settings import arrange, spread

SchedulerProgress = Literal["samples", "optimizer_steps"]
MaxStepsPolicy = Literal["error", "overwrite", "preserve"]
AnyLoader = DataLoader[object] | ODBDataLoader[object]


ODBTrainerBridgeState = BridgeState


@dataclass(frozen=True, slots=True)
class ODBTrainerBridge:
    """The result of `configure_trainer`."""

    trainer: Trainer
    handle: ODBHandle
    sample_budget: int | None = None
    max_optimizer_steps: int | None = None
    scheduler_progress: SchedulerProgress = "samples"

    @property
    def state(self) -> BridgeState:
        """The progress, as the Trainer itself counts it."""
        progress, step = self.trainer.progress, self.trainer._info
        info = None if step is None else ODBStepInfo(step.global_samples, step.loss_scale, step)
        samples = 0 if progress is None else progress.samples
        return BridgeState(samples, self.trainer.state.global_step, info)

    def consume_step(self, info: ODBStepInfo) -> None:
        """Does nothing: the Trainer counts each step once, even if its information is removed from the batch."""


class _Schedule(Protocol):
    def step(self) -> object: ...


class ODBDynamicBatchCallback(TrainerCallback):  # type: ignore[misc]
    """Counts samples instead of steps, for a Trainer that appends each batch's samples to ``state.total_batch_sizes``.

    Epochs and the learning rate's schedule follow the samples, and training ends after ``odb_total_samples``. A Trainer from
    `configure_trainer` counts by itself and does not need this callback.
    """

    def __init__(
        self,
        odb_total_samples: int | None = None,
        *,
        sample_budget: int | None = None,
        scheduler_progress: SchedulerProgress = "samples",
    ) -> None:
        self.sample_budget = odb_total_samples if sample_budget is None else sample_budget
        self._follows_samples = scheduler_progress == "samples"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        """Resets the counts."""
        state.total_data_step, state.accumulation_batch_size, state.total_batch_sizes = 0, 0, []

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Counts the samples of a micro-step."""
        sizes, state.total_batch_sizes = state.total_batch_sizes, []
        state.accumulation_batch_size += sum(sizes)
        state.total_data_step += sum(sizes)
        if not self.sample_budget:
            return
        state.epoch = state.total_data_step / self.sample_budget * args.num_train_epochs
        if state.total_data_step >= self.sample_budget:
            control.should_training_stop = True

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: _Schedule | None = None,
        **_: object,
    ) -> None:
        """Counts the samples of the update, and advances the schedule by the same number."""
        self.on_substep_end(args, state, control)
        # The Trainer itself makes one of the schedule's steps.
        if lr_scheduler is not None and self._follows_samples:
            for _step in range(state.accumulation_batch_size - 1):
                lr_scheduler.step()
        state.accumulation_batch_size = 0


class _Counter(TrainerCallback):  # type: ignore[misc]
    """Sets `TrainerState.total_data_step`, as the release does, to the number of samples that all ranks have trained on."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        state.total_data_step = 0

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        state.total_data_step = self._trainer.progress.samples


def configure_trainer(
    trainer: Trainer,
    *,
    dataloader: AnyLoader | None = None,
    handle: ODBHandle | None = None,
    sample_budget: int | None = None,
    max_optimizer_steps: int | None = None,
    scheduler_progress: SchedulerProgress = "samples",
    max_steps_policy: MaxStepsPolicy = "error",
    wrap_compute_loss: bool = True,
    replace_train_dataloader: bool = True,
    **apply_kwargs: object,
) -> ODBTrainerBridge:
    """Turns a Trainer into an `odb_ref.integrations.hf.ODBTrainer`, over the data of ``dataloader`` or its own.

    Training ends after ``sample_budget`` samples, with the number of epochs that they take, or after ``max_optimizer_steps``
    updates. The Trainer's loader is always replaced, so ``replace_train_dataloader`` has no effect.

    Raises: UsageError when settings contradict each other, and like `ODBDataLoader`.
    """
    settings, own = split_settings(apply_kwargs)
    config, options = _resolve(trainer, dataloader, handle, settings, own)
    _set_max_steps(trainer, max_optimizer_steps, max_steps_policy)
    if sample_budget is not None and isinstance(trainer.train_dataset, Sized):
        trainer.args.num_train_epochs = math.ceil(sample_budget / max(1, len(trainer.train_dataset)))
    enabled = enable(
        trainer,
        ODBOptions(
            update_samples=None,
            token_budget=config.token_budget,
            max_samples=sample_budget,
            follows_samples=scheduler_progress == "samples",
            checks_loss=False,  # the release calls `compute_loss` for batches of training alone
            loader=arrange({name: value for name, value in options.items() if name != "token_budget"}),  # type: ignore[arg-type]
        ),
    )
    enabled.takes_step_info = wrap_compute_loss
    trainer.add_callback(_Counter(trainer))
    return ODBTrainerBridge(trainer, ODBHandle(config), sample_budget, max_optimizer_steps, scheduler_progress)


def _resolve(
    trainer: Trainer,
    dataloader: AnyLoader | None,
    handle: ODBHandle | None,
    settings: Mapping[str, object],
    own: Mapping[str, object],
) -> tuple[ODBConfig, dict[str, object]]:
    """Returns the configuration, and the arguments of the Trainer's loader beside those that the Trainer sets."""
    # The Trainer rebuilds a loader that it has made. Its arguments then determine which samples a rank reads.
    is_trainers = is_prepared(dataloader)
    if isinstance(dataloader, ODBDataLoader):
        config = handle.config if handle is not None else dataloader.odb_config
        if settings:
            raise UsageError(
                f"the loader has its settings already, and {', '.join(sorted(settings))} is given beside it"
            )
        options = {**config.make_options(), **spread(own)} if is_trainers else {**dataloader.options, **spread(own)}
        if is_trainers and "window" in dataloader.options:
            options.setdefault("window", dataloader.options["window"])
    else:
        given: object = settings.get("config")
        rest = {name: value for name, value in settings.items() if name != "config"}
        if handle is not None:
            config = handle.config
        elif isinstance(given, ODBConfig | None):
            config = resolve_config(config=given, **rest)
        else:
            raise UsageError(f"config must be an ODBConfig, got {type(given).__name__}")
        options = {**config.make_options(), **spread(own)}
        if dataloader is not None and not is_trainers:
            options = make_options(dataloader, config, own)
    if dataloader is not None and not is_trainers:
        trainer.train_dataset = dataloader.dataset
    return config, options


def _set_max_steps(trainer: Trainer, steps: int | None, policy: MaxStepsPolicy) -> None:
    given = trainer.args.max_steps
    match policy:
        case "preserve":
            return
        case "error" if given > 0 and given != steps:
            raise UsageError(
                f"TrainingArguments(max_steps={given}) bounds training as well as the sample budget: leave it out, pass the "
                "same as max_optimizer_steps, or say max_steps_policy='overwrite' or 'preserve'"
            )
        case _:
            trainer.args.max_steps = -1 if steps is None else steps


def enable_odb(
    trainer: Trainer,
    *,
    train_dataloader: AnyLoader | None = None,
    dataloader: AnyLoader | None = None,
    train_dataset: object = None,
    dataset_size: int | None = None,
    num_train_epochs: float | None = None,
    sample_budget: int | None = None,
    token_budget: int | None = None,
    loss_scaling: LossScalingMode = "exact",
    join: bool | None = True,
    max_optimizer_steps: int | None = None,
    scheduler_progress: SchedulerProgress = "samples",
    max_steps_policy: MaxStepsPolicy = "overwrite",
    wrap_compute_loss: bool = True,
    replace_train_dataloader: bool = True,
    require_batch_size_one: bool = True,
    require_workers: bool = True,
    validate_pipeline: bool = True,
    **apply_kwargs: object,
) -> ODBTrainerBridge:
    """Turns a Trainer into an `odb_ref.integrations.hf.ODBTrainer`, for the epochs in its arguments.

    The arguments that require or validate something have no effect: batch size and number of workers do not matter, and a
    sample that cannot be measured ends the epoch with an error that names it.

    Raises: UsageError, like `configure_trainer`.
    """
    loader = dataloader if train_dataloader is None else train_dataloader
    if num_train_epochs is not None:
        trainer.args.num_train_epochs = num_train_epochs
    if train_dataset is not None and trainer.train_dataset is None:
        trainer.train_dataset = train_dataset
    if sample_budget is None and dataset_size is not None:
        sample_budget = math.ceil(dataset_size * trainer.args.num_train_epochs)
    if not isinstance(loader, ODBDataLoader):
        if token_budget is None and "config" not in apply_kwargs:
            token_budget = getattr(trainer.args, "odb_token_budget", None)
        settings = {"token_budget": token_budget, "loss_scaling": loss_scaling, "join": join}
        apply_kwargs = {name: value for name, value in settings.items() if value is not None} | apply_kwargs
    return configure_trainer(
        trainer,
        dataloader=loader,
        sample_budget=sample_budget,
        max_optimizer_steps=max_optimizer_steps,
        scheduler_progress=scheduler_progress,
        max_steps_policy=max_steps_policy,
        wrap_compute_loss=wrap_compute_loss,
        replace_train_dataloader=replace_train_dataloader,
        **apply_kwargs,  # type: ignore[arg-type]
    )


class ODBTrainerMixin:
    """For Trainers that take a step's information out of its batch themselves: ``class Mine(ODBTrainerMixin, Trainer)``.

    With `configure_trainer` or `enable_odb` gradients are exact over an update. With your own loader, which does not know about
    updates, they are the mean of the micro-steps' exact gradients.
    """

    odb_loss_scaling: LossScalingMode = "auto"
    loss_is_scaled_for_ga = True
    """Tells the Trainer not to divide the result of `compute_loss`, which is already weighted."""

    def set_odb_loss_scaling(self, loss_scaling: LossScalingMode) -> Self:
        """Chooses how losses are weighted; ``"auto"`` follows the loader."""
        self.odb_loss_scaling = loss_scaling
        return self

    def get_batch_samples(
        self, epoch_iterator: object, num_batches: int, device: torch.device
    ) -> tuple[list[object], object]:
        """Returns the batches of an update, without the Trainer's token count if they carry their own."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        return batches, None if any(map(carries_step, batches)) else count

    def compute_loss(
        self, model: nn.Module, inputs: MutableMapping[str, object], *args: object, **kwargs: object
    ) -> object:
        """Returns the loss, weighted if the batch says how. Stores its step's information in ``state.odb_step_infos``."""
        if not carries_step(inputs):
            other: object = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return other
        info = pop_step_info(inputs, loss_scaling=self.odb_loss_scaling)
        self.state.odb_step_infos = [info]  # type: ignore[attr-defined]
        result: object = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        steps: int = getattr(self, "current_gradient_accumulation_steps", 1)
        match result:
            case Tensor():
                return info.scale(result) / steps
            case (Tensor() as loss, *rest):
                return (info.scale(loss) / steps, *rest)
            case _:
                raise UsageError(
                    f"compute_loss returned {type(result).__name__}, expected a tensor, or a tuple with one first"
                )


class ODBTrainer(ODBTrainerMixin, Trainer):  # type: ignore[misc]
    """A Trainer that weights the losses of batches with step information. `configure_trainer` provides such batches."""


def setup_odb_training(  # noqa: PLR0917 (as the original has them)
    trainer: Trainer,
    dataloader: AnyLoader,
    max_input_length: int,
    loss_scaling: LossScalingMode = False,
    loss_scaling_approx: bool = True,
    join_mode: bool = True,
) -> ODBTrainerBridge:
    """Turns a Trainer into an `odb_ref.integrations.hf.ODBTrainer`, over a DataLoader, for the epochs in its arguments.

    Raises: UsageError when the loader is an `ODBDataLoader` already, and like `configure_trainer`.
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
