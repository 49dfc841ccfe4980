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

from functools import cached_property
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from odb_ref.integrations.lightning_loader import FollowedLoader
from odb_ref.integrations.lightning_trainer import LoaderCallback
from odb_ref.torch import UsageError


class LightningLoader(FollowedLoader):
    """An `ODBDataLoader` that knows what Lightning does to a loss, and which of its batches Lightning has trained on.

    ``options`` are those of `ODBDataLoader`; ``Loss(accumulation_steps=)`` is Lightning's ``accumulate_grad_batches``, 1
    with ``update_samples``. ``intervals`` say after how many samples or tokens to evaluate, besides at an epoch's end and in
    place of ``val_check_interval``, and to save (`IntervalCheckpoint`). Its `callback` goes to the Trainer.

    Raises: UsageError as `ODBDataLoader`, and when an option is not the caller's to choose.
    """

    @cached_property
    def callback(self) -> LoaderCallback:
        """Follows training, and keeps the loader's place in checkpoints."""
        return LoaderCallback(self)


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
