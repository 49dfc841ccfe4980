"""Connects a Lightning Trainer and a `LightningLoader`, and checks for settings of the Trainer that do not work with it."""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "lightning", extra="lightning")

import math
import sys
import warnings
from collections.abc import Mapping
from typing import Final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    RichProgressBar,
    TQDMProgressBar,
)

from odb_ref.integrations.lightning_loader import FollowedLoader
from odb_ref.torch import UsageError

_ENDING: Final = {"overfit_batches": 0.0, "limit_train_batches": 1.0}
"""The Trainer's settings that end an epoch by counting batches, with their defaults."""
_COUNTED: Final = {**_ENDING, "val_check_interval": 1.0}
"""All settings that count batches."""
_NEVER: Final = sys.maxsize
"""The ``val_check_interval`` with which Lightning never evaluates after a batch."""


_Loops = Mapping[str, Mapping[str, Mapping[str, int]]]


class LoaderCallback(Callback):  # type: ignore[misc]
    """Tells a `LightningLoader` what Lightning does, and Lightning what to save. Made by `LightningLoader.callback`."""

    def __init__(self, loader: FollowedLoader) -> None:
        self.loader = loader

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Prepares the Trainer before optimizers and schedules are made, which may ask it for the number of steps.

        Raises: UsageError when a setting of the Trainer does not work with this loader.
        """
        kind = type(trainer)
        if not issubclass(kind, _CountingTrainer):
            trainer.__class__ = type(f"ODB{kind.__name__}", (_CountingTrainer, kind), {})
        if stage != "fit":
            return
        loader = self.loader
        check_counts(trainer, is_free=loader.loader.update_samples is None)
        self._check_strategy(trainer)
        self._check_division(trainer)
        if loader.intervals.evaluates and not trainer.fast_dev_run:
            self._evaluate_by_intervals(trainer)
        loader.trainer = trainer
        loader.follow(trainer.fit_loop.epoch_progress.current.processed)

    def _check_strategy(self, trainer: Trainer) -> None:
        """Refuses a strategy that has fixed how many batches an optimizer step takes, if an update may hold another number."""
        loader, strategy = self.loader, trainer.strategy
        has_several = loader.loader.update_samples is not None or loader.accumulation_steps > 1
        if has_several and strategy.handles_gradient_accumulation:
            raise UsageError(
                f"{type(strategy).__name__} divides losses and steps by its own count of batches, but an update may hold any "
                "number of them: use DDP or ModelParallelStrategy, or DeepSpeed without Lightning"
            )

    def _check_division(self, trainer: Trainer) -> None:
        if trainer.accumulate_grad_batches != self.loader.accumulation_steps:
            raise UsageError(
                f"Lightning divides losses by accumulate_grad_batches={trainer.accumulate_grad_batches}, but the loader's "
                f"weights are for accumulation_steps={self.loader.accumulation_steps}: set both to the same number (with "
                "update_samples=, to 1)"
            )

    def _evaluate_by_intervals(self, trainer: Trainer) -> None:
        """Lets callbacks that monitor a metric act after each evaluation. With 1.0 they act only at an epoch's end."""
        for callback in trainer.callbacks[: trainer.callbacks.index(self)]:
            if isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end:
                raise UsageError(
                    "EarlyStopping has chosen to act at the end of an epoch: to evaluate by intervals=, put loader.callback "
                    "before it in Trainer(callbacks=), or pass EarlyStopping(check_on_train_epoch_end=False)"
                )
        if getattr(trainer, "val_check_interval", None) == 1.0:
            trainer.val_check_interval = _NEVER

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Restores the Trainer for another loader, and the loader for another Trainer."""
        loader = self.loader
        if loader.trainer is None or loader.trainer is not trainer:
            return
        loader.trainer = None
        if loader.loader.update_samples is not None:
            trainer.accumulate_grad_batches = loader.accumulation_steps = 1
        if getattr(trainer, "val_check_interval", None) == _NEVER:
            trainer.val_check_interval = 1.0

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Calls `teardown`, which Lightning leaves out after an exception."""
        self.teardown(trainer, module, "fit")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Checks the module. Estimates the epoch's length, for which samples are read, only if a progress bar shows it.

        Raises: UsageError when a setting of the module does not work with this loader.
        """
        if trainer.train_dataloader is not self.loader:
            raise UsageError(
                "this callback's LightningLoader is not the train loader, which is a "
                f"{type(trainer.train_dataloader).__name__}: pass the loader itself to fit(), not in a list or a dict"
            )
        if not module.automatic_optimization:
            raise UsageError(
                "a LightningLoader needs a module with automatic optimization. To step optimizers yourself, use an "
                "ODBDataLoader in a loop of your own, or with Accelerate"
            )
        if self.loader.loader.update_samples is not None or self.loader.accumulation_steps > 1:
            check_frequency(trainer)
        if self.loader.intervals.evaluates:
            trainer.val_check_batch = math.inf
        if trainer.progress_bar_callback is not None:
            self.loader.estimate_epoch()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        """Notes which batch is being trained on.

        Raises: UsageError when Lightning would normalise its loss differently from what the loader expects.
        """
        if self.loader.loader.update_samples is None:
            self._check_division(trainer)
        is_begun = self.loader.is_inside_update
        counts = trainer.fit_loop.epoch_loop.batch_progress
        done = counts.total.processed + 1
        self.loader.begin_step(batch_idx, trainer.current_epoch, lambda: counts.total.processed >= done)
        trainer.accumulate_grad_batches = self.loader.choose_accumulation(counts.current.ready)
        # Lightning itself zeroes the gradients for an epoch's first update.
        if batch_idx and not is_begun and self.loader.loader.update_samples is not None:
            for optimizer in trainer.optimizers:
                for callback in trainer.callbacks:
                    callback.on_before_zero_grad(trainer, module, optimizer)
                module.on_before_zero_grad(optimizer)
                module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Notes that the batch was trained on, logs the coverage and schedules evaluations."""
        loader = self.loader
        loader.end_step()
        if loader.progress.is_exact:
            module.log("train_coverage", loader.progress.coverage, on_step=True, on_epoch=False, batch_size=1)
        if loader.intervals.evaluates:
            # Lightning reads this next. It evaluates after every batch, or only after an epoch's last.
            trainer.val_check_batch = 1 if loader.intervals.is_evaluation_due(loader.progress) else math.inf
        show_total(trainer, loader.compute_batches())

    def state_dict(self) -> dict[str, object]:
        """Returns the state for Lightning's checkpoint."""
        return self.loader.gather_state()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Loads the state from Lightning's checkpoint, unless it is loaded for an evaluation between trainings."""
        if self.loader.trainer is not None:
            self.loader.load_gathered_state(state_dict)

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Mapping[str, _Loops]]
    ) -> None:
        """Begins with the epoch of a checkpoint that has no state of this loader, for example from a plain run."""
        if self.loader.trainer is None or self.state_key in checkpoint["callbacks"]:
            return
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        self.loader.follow(epochs["processed"])
        if epochs["ready"] != epochs["processed"]:
            warnings.warn(
                f"the checkpoint was made inside epoch {epochs['processed']}, but has no state of the LightningLoader, which "
                "begins that epoch again",
                RuntimeWarning,
                stacklevel=2,
            )


class _CountingTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that knows how many steps a `LightningLoader` yields. Lightning assumes -1 for a loader without a length."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The optimizer steps of training; in the free mode an estimate. Raises: UsageError when they are unknown."""
        found: int | float = super().estimated_stepping_batches
        own = next((item.loader for item in self.callbacks if isinstance(item, LoaderCallback)), None)
        if own is None or own is not self.train_dataloader or self.max_epochs in (None, -1):
            return found
        updates = own.count_updates(max(1, self.max_epochs))
        if self.max_steps != -1:
            return min(updates, int(self.max_steps))
        if math.isinf(updates):
            raise UsageError("the number of updates in an epoch of a stream is not known: pass Trainer(max_steps=)")
        return updates


def check_counts(trainer: Trainer, *, is_free: bool) -> None:
    """Refuses settings that count batches; in the free mode only those that end an epoch by it.

    Raises: UsageError that names what to set instead.
    """
    for name, default in () if trainer.fast_dev_run else (_ENDING if is_free else _COUNTED).items():
        value = getattr(trainer, name, default)  # not set if the interval is given as a time
        if value != default or (isinstance(value, int) and value):  # the integer 1 is one batch, and 1.0 all of them
            raise UsageError(
                f"Trainer({name}={value}) counts batches, but an update or an epoch may hold any number of them: use "
                "max_steps=, or LightningLoader(intervals=Intervals(...)) to evaluate by samples"
            )
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise UsageError("GradientAccumulationScheduler cannot be used with a LightningLoader: use update_samples=")


def check_frequency(trainer: Trainer) -> None:
    """Refuses schedules that count batches if an update may hold several.

    Raises: UsageError that names what to set instead.
    """
    for schedule in trainer.lr_scheduler_configs:
        if schedule.interval == "step" and schedule.frequency > 1:
            raise UsageError(
                f"lr_scheduler: with frequency={schedule.frequency} Lightning counts micro-batches, not updates: leave "
                f"frequency at 1, and count in the schedule, for example LambdaLR with step // {schedule.frequency}"
            )


def show_total(trainer: Trainer, total: int | None) -> None:
    """Sets the total of Lightning's progress bars. Lightning asks for a length only once per epoch, when it is unknown."""
    match trainer.progress_bar_callback:
        case TQDMProgressBar() as bar if bar.is_enabled:
            bar.train_progress_bar.total = total
        case RichProgressBar() as bar if bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, total=total)
