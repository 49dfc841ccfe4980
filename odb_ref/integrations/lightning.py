"""`LightningLoader`: an `ODBDataLoader` as the train loader of a Lightning Trainer, and `scale_loss` for its training step.

    class Tuned(LightningModule):
        def training_step(self, batch, batch_idx):
            loss = ...  # the mean over this batch's supervised tokens
            return scale_loss(self, loss)

    loader = LightningLoader(dataset, token_budget=16_384, loss=Loss(accumulation_steps=2), collate_fn=collate)
    trainer = Trainer(strategy="ddp", accumulate_grad_batches=2, max_epochs=3, callbacks=[loader.callback])
    trainer.fit(Tuned(), loader)

With ``update_samples=N`` every optimizer step is an update of exactly N samples: the callback sets
``accumulate_grad_batches``, which is left at 1, before each batch, so that Lightning steps where an update ends.
``global_step``, ``max_steps`` and schedules by the step count updates, as in plain training with batches of N samples.

In the free mode Lightning divides each loss by ``accumulate_grad_batches``; the loader's weights allow for it, and another
number than the loader's is refused. The gradient of every optimizer step is that of the mean over all supervised tokens of its
update on all ranks. An epoch whose last update is not full ends with up to ``accumulation_steps - 1`` idle replays.

Lightning shards and wraps loaders of PyTorch's class only: ``use_distributed_sampler`` changes nothing here. Since the length
of an epoch is not known before its end, Lightning reads one batch ahead, and ``max_epochs`` or ``max_steps`` ends training.

The callback keeps the loader's place in each checkpoint: that after the last update, of all ranks, so that another number of
ranks can go on from it; an update that was under way is made anew, whole. Lightning's own support for loaders with a state is
not used: it keeps rank 0's state only, and loads none from a checkpoint made at the end of an epoch. In the free mode the place
is that after the last batch, since Lightning continues with its count of batches: a checkpoint in the middle of an update loses
the update's gradient, as Lightning's do, which is warned of.

The callback also logs ``train_coverage``, the share of the epoch's samples trained on, and has the progress bar count towards
what the epoch is estimated to take. ``LightningLoader(intervals=Intervals(...))`` evaluates by samples or tokens, besides at an
epoch's end, and `IntervalCheckpoint` saves by them.

The module uses automatic optimization, and a training_step that takes a batch. Run and tested with DDP, and
with FSDP 2 by `ModelParallelStrategy`; other strategies were not run.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "lightning", extra="lightning")

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self, Unpack

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    RichProgressBar,
    TQDMProgressBar,
)
from torch import Tensor
from torch.utils.data import Dataset

from odb_ref.integrations.progress import Intervals, Progress
from odb_ref.integrations.steps import read_updates
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError
from odb_ref.torch.gathering import gather_objects
from odb_ref.torch.settings import LoaderArguments, Loss, check_spelling, spread

_RANKS: Final = "ranks"
_PROGRESS: Final = "progress"
_ENDING: Final = {"overfit_batches": 0.0, "limit_train_batches": 1.0}
"""What of a Trainer ends an epoch by counting batches, and what it is where nobody has said it."""
_COUNTED: Final = {**_ENDING, "val_check_interval": 1.0}
"""What counts batches at all."""
_NEVER: Final = sys.maxsize
"""The ``val_check_interval`` by which Lightning evaluates at no batch."""


class LightningLoader:
    """An `ODBDataLoader` that knows what Lightning does to a loss, and which of its batches Lightning has trained on.

    ``options`` are those of `ODBDataLoader`; ``Loss(accumulation_steps=)`` is Lightning's ``accumulate_grad_batches``, 1
    with ``update_samples``. ``intervals`` say after how many samples or tokens to evaluate, besides at an epoch's end and in
    place of ``val_check_interval``, and to save (`IntervalCheckpoint`). Its `callback` goes to the Trainer.

    Raises: UsageError as `ODBDataLoader`, and when an option is not the caller's to choose.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        *,
        token_budget: int,
        intervals: Intervals | None = None,
        **options: Unpack[LoaderArguments],
    ) -> None:
        check_spelling(options)
        loss = options.get("loss", Loss())
        if loss.is_divided_by_trainer:
            raise UsageError("LightningLoader: is_divided_by_trainer is not to be given: Lightning always divides")
        if "on_idle" in spread(options):
            raise UsageError("LightningLoader: Lightning needs a batch in every step, so on_idle must be 'replay'")
        options["loss"] = replace(loss, is_divided_by_trainer=options.get("update_samples") is None)
        self.loader = ODBDataLoader(dataset, token_budget=token_budget, **options)  # type: ignore[arg-type]
        self.accumulation_steps = loss.accumulation_steps
        """Into so many parts Lightning divides the loss of a batch; with ``update_samples`` chosen for each."""
        self.intervals = Intervals() if intervals is None else intervals
        self.progress = Progress(math.inf)
        """How far training has come."""
        self._info: StepInfo | None = None
        """What belongs to the batch that is being trained on, or was last."""
        self.trainer: Trainer | None = None
        """The Trainer that fits by it now."""
        self.callback = LoaderCallback(self)
        """Follows training, and keeps the loader's place in checkpoints."""
        self._read_ahead: deque[tuple[StepInfo, Mapping[str, object]]] = deque()
        self._place: Mapping[str, object] | None = None
        """The loader's state that a checkpoint keeps: after what was trained on; at first that of the beginning."""
        self._after: Mapping[str, object] | None = None
        """What follows it when training on the present batch is done; None where nothing does, inside an update."""
        self._is_trained_on: Callable[[], bool] = bool
        """Whether training on that batch is done, the optimizer's step included."""
        self._is_scaled = False
        self._begun: int | None = None
        """The epoch that was begun, and of which no batch was trained on yet."""
        self._loaded: list[Mapping[str, object]] = []

    def __iter__(self) -> Iterator[object]:
        """Begins an epoch.

        Raises: UsageError when this is not the training of a Trainer with its callback: losses would not be weighed.
        """
        if self.trainer is None or self.callback not in self.trainer.callbacks:
            raise UsageError(
                "a LightningLoader is read by Trainer(callbacks=[loader.callback]) alone (EvaluationLoader is for what is not "
                "training). A Tuner and LearningRateFinder take callbacks away: find the rate with a plain DataLoader, whose "
                "updates are those of update_samples="
            )
        if not self.trainer.training:
            raise UsageError("the train loader is read to evaluate: EvaluationLoader is for what is not training")
        if self._begun is not None and self._read_ahead:
            # Lightning has read ahead in an epoch and begins it again.
            self.loader.set_epoch(self._begun)
            if self._loaded:
                self.loader.load_state_dict(self._loaded)
        self._begun = self.loader.epoch
        self._read_ahead.clear()
        self._info = None  # an update that was broken off before is not continued with
        if self._place is None:
            self._place = self.loader.state_dict()  # now: a batch is read ahead of the first step
        return self._read()

    def _read(self) -> Iterator[object]:
        for batch, info in read_updates(self.loader, self._counted_steps):
            self._read_ahead.append((info, self.loader.state_dict()))
            yield batch

    def follow(self, epoch: int) -> None:
        """Begins with Lightning's epoch where that is a later one."""
        if epoch > self.loader.epoch:
            self.loader.set_epoch(epoch)

    def begin_step(self, batch_idx: int, epoch: int, is_trained_on: Callable[[], bool]) -> None:
        """Notes that Lightning trains on the next batch, the one of ``batch_idx`` in its own count of its own ``epoch``, and
        how to ask whether that is done.

        Raises: UsageError when it counts the micro-steps of an update otherwise than the loader.
        """
        self._settle()
        self._info, place = self._read_ahead.popleft()
        # With update_samples Lightning's count of batches does not matter, so an update can be made anew from its start.
        self._after = place if self.loader.update_samples is None or self._info.is_update_end else None
        self._is_trained_on = is_trained_on
        if self._loaded and self._info.epoch != epoch:
            warnings.warn(
                f"Lightning continues with its epoch {epoch}, and the loader with the rest of epoch {self._info.epoch}, where "
                "it was saved: Lightning counts an epoch in which max_steps was reached as whole",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._loaded and self._info.step % self._counted_steps:
            warnings.warn(
                "the checkpoint was made inside an update, and the gradient of that update's first batches is not in it: make "
                "checkpoints where updates end, as by every_n_train_steps",
                RuntimeWarning,
                stacklevel=2,
            )
        self._is_scaled = False
        self._begun, self._loaded = None, []
        if (batch_idx - self._info.step) % self._counted_steps:
            raise UsageError(
                f"Lightning's batch {batch_idx} and the loader's step {self._info.step} are at different places of an "
                f"update of {self._counted_steps} batches: go on from a checkpoint made at the end of one"
            )

    def _settle(self) -> None:
        """Follows the place when the batch is trained on: asked when it matters, since other callbacks save in any hook."""
        if self._after is not None and self._is_trained_on():
            self._place, self._after = self._after, None

    @property
    def _counted_steps(self) -> int:
        """By how many batches an update is counted: with ``update_samples`` it has any number, and its end is told."""
        return self.accumulation_steps if self.loader.update_samples is None else 1

    @property
    def has_micro_batches(self) -> bool:
        """True when an update may hold several batches."""
        return self.loader.update_samples is not None or self.accumulation_steps > 1

    @property
    def is_inside_update(self) -> bool:
        """True when the batch trained on last has not ended its update."""
        return self._info is not None and not self._info.is_update_end

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss of the batch being trained on, weighed; once for each batch.

        Raises: UsageError when there is no such batch, or its loss was scaled before.
        """
        if self._info is None or self._is_scaled:
            raise UsageError(
                "scale_loss: no batch is being trained on, or its loss was scaled before: it would count twice (as with an "
                "optimizer that computes a loss several times in a step, LBFGS say, which is not supported)"
            )
        self._is_scaled = True
        scaled = self._info.scale(loss)
        return scaled if self.loader.update_samples is None else scaled * self.accumulation_steps

    def choose_accumulation(self, batches: int) -> int:
        """Returns what ``accumulate_grad_batches`` must be for Lightning to step after this batch, number ``batches`` of the
        epoch from 1, or not. It steps where that divides ``batches``, and zeroes gradients where it divides the number before.
        """
        if self.loader.update_samples is not None and self._info is not None:
            self.accumulation_steps = batches if self._info.is_update_end else 2 * batches
        return self.accumulation_steps

    def end_step(self) -> None:
        """Notes that Lightning has trained on the batch.

        Raises: UsageError when its loss was not scaled.
        """
        if not self._is_scaled or self._info is None:
            raise UsageError(
                "a batch was trained on without its weight: training_step must return scale_loss(self, loss)"
            )
        self.progress.note_step(self._info)

    def estimate_epoch(self) -> None:
        """Estimates the length of an epoch from some samples' lengths, where that is not known yet; a collective."""
        if self.loader.has_updates_per_epoch:
            self.progress.updates_per_epoch = self.loader.updates_per_epoch
        elif math.isinf(self.progress.updates_per_epoch):
            try:
                self.progress.updates_per_epoch = self.loader.estimate_steps() / self.accumulation_steps
            except UsageError:
                return  # a stream, say: known when the first epoch is over

    def count_updates(self, epochs: int) -> float:
        """Returns how many optimizer steps so many epochs take, in the free mode about, infinite where nobody knows; a
        collective.
        """
        self.estimate_epoch()
        updates = self.progress.updates_per_epoch * epochs
        return updates if math.isinf(updates) else math.ceil(updates)

    def compute_batches(self) -> int | None:
        """Returns about how many batches the present epoch has, exactly at its end; None while nobody knows."""
        info, updates = self._info, self.progress.updates_per_epoch
        if self.loader.update_samples is not None:
            return None if info is None or not info.is_last else info.step + 1
        if info is None or math.isinf(updates):
            return None if math.isinf(updates) else round(updates * self.accumulation_steps)
        is_over = info.is_last and info.is_update_end
        return info.step + 1 if is_over else max(round(updates * self.accumulation_steps), info.step + 2)

    def gather_state(self) -> dict[str, object]:
        """Returns all ranks' places after what was trained on; every rank calls it. Spec: R10."""
        self._settle()
        gathered = gather_objects(self._place or self.loader.state_dict(), None)
        # Ranks that share their batches, by a device mesh, have equal states.
        by_rank = {int(str(state["rank"])): state for state in gathered}
        return {_RANKS: [by_rank[rank] for rank in sorted(by_rank)], _PROGRESS: self.progress.state_dict()}

    def load_gathered_state(self, state: Mapping[str, object]) -> None:
        """Goes on from a saved state with the next iteration, on the ranks there are now.

        Raises: UsageError when this is no such state.
        """
        states, progress = state.get(_RANKS), state.get(_PROGRESS)
        if not isinstance(states, Sequence) or not isinstance(progress, Mapping):
            raise UsageError("this is not a state of a LightningLoader")
        self.progress.load_state_dict(progress)
        self.loader.load_state_dict(states)
        self._loaded = list(states)
        self._place = self._after = self._begun = None

    def close(self) -> None:
        """Ends the loader: see `ODBDataLoader.close`."""
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_Loops = Mapping[str, Mapping[str, Mapping[str, int]]]


class LoaderCallback(Callback):  # type: ignore[misc]
    """Tells a `LightningLoader` what Lightning does, and Lightning what to save of it. Not made by hand."""

    def __init__(self, loader: LightningLoader) -> None:
        self._loader = loader

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Before optimizers and schedules are made, which may ask the trainer how many steps there will be.

        Raises: UsageError when the Trainer is to do what does not go with this loader.
        """
        kind = type(trainer)
        if not issubclass(kind, _CountingTrainer):
            trainer.__class__ = type(f"ODB{kind.__name__}", (_CountingTrainer, kind), {})
        if stage != "fit":
            return
        loader = self._loader
        _check_counts(trainer, loader)
        self._check_division(trainer)
        if loader.intervals.evaluates and not trainer.fast_dev_run:
            self._evaluate_by_intervals(trainer)
        loader.trainer = trainer
        loader.follow(trainer.fit_loop.epoch_progress.current.processed)

    def _check_division(self, trainer: Trainer) -> None:
        if trainer.accumulate_grad_batches != self._loader.accumulation_steps:
            raise UsageError(
                f"Lightning divides losses by accumulate_grad_batches={trainer.accumulate_grad_batches}, the loader's weights "
                f"are for accumulation_steps={self._loader.accumulation_steps}: unequal, they would normalise wrongly"
            )

    def _evaluate_by_intervals(self, trainer: Trainer) -> None:
        """Lets callbacks that monitor a metric act after each evaluation: by 1.0 they would at an epoch's end only."""
        for callback in trainer.callbacks[: trainer.callbacks.index(self)]:
            if isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end:
                raise UsageError(
                    "EarlyStopping has chosen to act at an epoch's end: with intervals= to evaluate by, let loader.callback "
                    "stand before it in Trainer(callbacks=), or say EarlyStopping(check_on_train_epoch_end=False)"
                )
        if getattr(trainer, "val_check_interval", None) == 1.0:
            trainer.val_check_interval = _NEVER

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """The Trainer is as it was, for another loader, and the loader for another Trainer."""
        loader = self._loader
        if loader.trainer is None or loader.trainer is not trainer:
            return
        loader.trainer = None
        if loader.loader.update_samples is not None:
            trainer.accumulate_grad_batches = loader.accumulation_steps = 1
        if getattr(trainer, "val_check_interval", None) == _NEVER:
            trainer.val_check_interval = 1.0

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Lightning does not come to `teardown`."""
        self.teardown(trainer, module, "fit")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Nothing is read for an estimate where no bar would show it.

        Raises: UsageError when the module is to do what does not go with this loader.
        """
        if trainer.train_dataloader is not self._loader:
            raise UsageError("this callback's LightningLoader is not the train loader")
        if not module.automatic_optimization:
            raise UsageError("a LightningLoader needs a module with automatic optimization")
        if self._loader.has_micro_batches:
            for schedule in trainer.lr_scheduler_configs:
                if schedule.interval == "step" and schedule.frequency > 1:
                    raise UsageError(
                        f"lr_scheduler: by frequency={schedule.frequency} Lightning counts micro-batches, not updates: leave "
                        f"it at 1, and let the schedule count, as by LambdaLR with step // {schedule.frequency}"
                    )
        if self._loader.intervals.evaluates:
            trainer.val_check_batch = math.inf
        if trainer.progress_bar_callback is not None:
            self._loader.estimate_epoch()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        """Which batch is being trained on.

        Raises: UsageError when Lightning would normalise its loss otherwise than the loader expects.
        """
        if self._loader.loader.update_samples is None:
            self._check_division(trainer)
        is_begun = self._loader.is_inside_update
        counts = trainer.fit_loop.epoch_loop.batch_progress
        done = counts.total.processed + 1
        self._loader.begin_step(batch_idx, trainer.current_epoch, lambda: counts.total.processed >= done)
        trainer.accumulate_grad_batches = self._loader.choose_accumulation(counts.current.ready)
        # An epoch's first update Lightning begins by itself.
        if batch_idx and not is_begun and self._loader.loader.update_samples is not None:
            for optimizer in trainer.optimizers:
                for callback in trainer.callbacks:
                    callback.on_before_zero_grad(trainer, module, optimizer)
                module.on_before_zero_grad(optimizer)
                module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """The batch has been trained on."""
        loader = self._loader
        loader.end_step()
        if loader.progress.is_exact:
            module.log("train_coverage", loader.progress.coverage, on_step=True, on_epoch=False, batch_size=1)
        if loader.intervals.evaluates:
            # What Lightning asks next: after every batch, or after none but an epoch's last.
            trainer.val_check_batch = 1 if loader.intervals.is_evaluation_due(loader.progress) else math.inf
        _show_total(trainer, loader.compute_batches())

    def state_dict(self) -> dict[str, object]:
        """Returns the state for Lightning's checkpoint."""
        return self._loader.gather_state()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Takes the state from Lightning's checkpoint, but where that is one to evaluate, between two times of training."""
        if self._loader.trainer is not None:
            self._loader.load_gathered_state(state_dict)

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Mapping[str, _Loops]]
    ) -> None:
        """Begins with the epoch of a checkpoint in which there is nothing of this loader: one of a plain run, say."""
        if self._loader.trainer is None or self.state_key in checkpoint["callbacks"]:
            return
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        self._loader.follow(epochs["processed"])
        if epochs["ready"] != epochs["processed"]:
            warnings.warn(
                f"the checkpoint was made inside epoch {epochs['processed']}, and has no state of the LightningLoader, which "
                "begins that epoch anew",
                RuntimeWarning,
                stacklevel=2,
            )


class _CountingTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that knows how many steps a `LightningLoader` gives it: Lightning says -1 where a loader has no length."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The optimizer steps of training, in the free mode about so many.

        Raises: UsageError when nobody knows.
        """
        found: int | float = super().estimated_stepping_batches
        loader = self.train_dataloader
        if not isinstance(loader, LightningLoader) or self.max_epochs in (None, -1):
            return found
        updates = loader.count_updates(max(1, self.max_epochs))
        if self.max_steps != -1:
            return min(updates, int(self.max_steps))
        if math.isinf(updates):
            raise UsageError("how many updates an epoch of a stream takes is not known: say Trainer(max_steps=)")
        return updates


class IntervalCheckpoint(Checkpoint):  # type: ignore[misc]
    """Saves into a folder by the loader's ``intervals``, as ``samples=N.ckpt``: a callback for the Trainer."""

    def __init__(self, loader: LightningLoader, folder: str | Path) -> None:
        self._loader = loader
        self._folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Lightning calls it after the loader's callback, as every `Checkpoint`."""
        if self._loader.intervals.is_save_due(self._loader.progress):
            trainer.save_checkpoint(self._folder / f"samples={self._loader.progress.samples}.ckpt")


def _check_counts(trainer: Trainer, loader: LightningLoader) -> None:
    is_free = loader.loader.update_samples is None
    for name, default in () if trainer.fast_dev_run else (_ENDING if is_free else _COUNTED).items():
        value = getattr(trainer, name, default)  # where it is a time, there is none
        if value != default or (isinstance(value, int) and value):  # 1 is a batch, and 1.0 is all
            raise UsageError(
                f"Trainer({name}={value}) counts batches, of which an update or an epoch holds any number: say max_steps=, or "
                "LightningLoader(intervals=Intervals(...)) to evaluate by samples"
            )
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise UsageError("GradientAccumulationScheduler does not go with a LightningLoader: say update_samples=")


def _show_total(trainer: Trainer, total: int | None) -> None:
    """Sets the batches that Lightning's bars count towards: it asks for a length only once an epoch, and there is none then."""
    match trainer.progress_bar_callback:
        case TQDMProgressBar() as bar if bar.is_enabled:
            bar.train_progress_bar.total = total
        case RichProgressBar() as bar if bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, total=total)


def scale_loss(module: LightningModule, loss: Tensor) -> Tensor:
    """Returns the mean loss of the batch being trained on, weighed: what ``training_step`` returns, called once in it.

    Preserves: WEIGHT.

    Raises: UsageError when the train loader is not a `LightningLoader`, or the loss is scaled twice.
    """
    trainer = module.trainer
    loader = trainer.train_dataloader
    if not isinstance(loader, LightningLoader):
        raise UsageError(f"scale_loss: the train loader is a {type(loader).__name__}, not a LightningLoader")
    if not trainer.training:
        raise UsageError("scale_loss is for training_step")
    return loader.scale(loss)
