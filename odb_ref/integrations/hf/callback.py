"""Keeps the Trainer's loop in step with the loader, through a callback."""

from __future__ import annotations

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from odb_ref.integrations.hf.steps import SteppingTrainer


class TrainerHooks(TrainerCallback):  # type: ignore[misc]
    """Informs the Trainer's loop about the loader's position."""

    def __init__(self, trainer: SteppingTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        """Corrects the number of updates in the progress bar, if it is an estimate."""
        trainer = self._trainer
        if args.max_steps > 0 or trainer.progress is None or not trainer.is_free:
            return
        # Keep it an estimate until the last update of the last epoch is about to be made.
        at_least = state.global_step + 2
        done = trainer.compute_share()
        total = trainer.progress.updates_per_epoch * args.num_train_epochs
        if done:
            total = state.global_step + (1 - done) * max(total, state.global_step)
        state.max_steps = at_least - 1 if trainer.is_ending else max(round(total), at_least)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.total = state.max_steps

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **_: object) -> None:
        """Checks that the update has a weight."""
        self._trainer.check_weighed()

    def on_optimizer_step(self, args: object, state: object, control: object, **_: object) -> None:
        """Notes that the optimizer has made the update."""
        self._trainer.note_update()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Sets the progress of training, and whether to evaluate, save or stop."""
        trainer, progress, odb = self._trainer, self._trainer.progress, self._trainer.odb
        if (epoch := trainer.compute_epoch()) is not None:
            state.epoch = epoch
        if progress is not None:
            control.should_evaluate |= odb.intervals.is_evaluation_due(progress)
            control.should_save |= odb.intervals.is_save_due(progress)
            has_samples = odb.max_samples is not None and progress.samples >= odb.max_samples
            if has_samples or (trainer.is_free and args.max_steps <= 0 and progress.epochs >= args.num_train_epochs):
                state.max_steps = state.global_step
                control.should_training_stop = True
        if state.global_step >= state.max_steps and trainer.is_free:
            # Otherwise the Trainer adds this rank's loss of the last updates to its train_loss, not that of all ranks.
            control.should_log = True

    def on_evaluate(
        self, args: object, state: object, control: object, metrics: dict[str, float] | None = None, **_: object
    ) -> None:
        """Lets the metrics choose the next token budget."""
        if metrics is not None:
            self._trainer.note_metrics(metrics)
