"""`LightningLoader`: an `ODBDataLoader` as the train loader of a Lightning Trainer. `scale_loss` is for its training step.

    class Tuned(LightningModule):
        def training_step(self, batch, batch_idx):
            loss = ...  # the mean over this batch's supervised tokens
            return scale_loss(self, loss)

    loader = LightningLoader(dataset, token_budget=16_384, loss=Loss(accumulation_steps=2), collate_fn=collate)
    trainer = Trainer(strategy="ddp", accumulate_grad_batches=2, max_epochs=3, callbacks=[loader.callback])
    trainer.fit(Tuned(), loader)

With ``update_samples=N`` every optimizer step is an update of exactly N samples. Leave ``accumulate_grad_batches`` at 1: the
callback sets it before each batch, so that Lightning steps where an update ends. ``global_step``, ``max_steps`` and
step-based schedules count updates, as in plain training with batches of N samples.

In the free mode Lightning divides each loss by ``accumulate_grad_batches``. The loader's weights take this into account, and a
number other than the loader's is refused. The gradient of every optimizer step is that of the mean over all supervised tokens
of its update on all ranks. An epoch whose last update is not full ends with up to ``accumulation_steps - 1`` idle replays.

Lightning shards and wraps only loaders of PyTorch's class, so ``use_distributed_sampler`` has no effect here. An epoch's length
is unknown before its end, so Lightning reads one batch ahead, and ``max_epochs`` or ``max_steps`` ends training.

The callback saves the loader's position in each checkpoint. It is the position of all ranks after the last update, so another
number of ranks can resume from it, and an update in progress is repeated as a whole. Lightning's own support for stateful
loaders is not used, because it keeps only rank 0's state, and loads none from a checkpoint made at the end of an epoch. In the
free mode the position is that after the last batch, because Lightning continues its count of batches. A checkpoint in the
middle of an update then loses the update's gradient, as Lightning's own do, and a warning says so.

The callback also logs ``train_coverage``, the share of the epoch's samples trained on, and makes the progress bar count towards
the estimated length of the epoch. ``LightningLoader(intervals=Intervals(...))`` evaluates by samples or tokens, in addition to
the end of an epoch, and `IntervalCheckpoint` saves by them.

The module must use automatic optimization, and a training_step that takes a batch. Tested with DDP, and with FSDP 2 through
`ModelParallelStrategy`. `FSDPStrategy` was run on one GPU only; other strategies are untested.
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
    """An `ODBDataLoader` that compensates for what Lightning does to a loss, and tracks what Lightning has trained on.

    ``options`` are those of `ODBDataLoader`. ``Loss(accumulation_steps=)`` must equal Lightning's ``accumulate_grad_batches``;
    with ``update_samples`` it is 1. ``intervals`` set after how many samples or tokens to evaluate, in addition to an epoch's
    end and instead of ``val_check_interval``, and to save (`IntervalCheckpoint`). Pass its `callback` to the Trainer.

    Raises: UsageError like `ODBDataLoader`, and when an option is not free to choose.
    """

    @cached_property
    def callback(self) -> LoaderCallback:
        """Follows training, and keeps the loader's position in checkpoints."""
        return LoaderCallback(self)


class IntervalCheckpoint(Checkpoint):  # type: ignore[misc]
    """A Trainer callback that saves into a folder by the loader's ``intervals``, as ``samples=N.ckpt``."""

    def __init__(self, loader: LightningLoader, folder: str | Path) -> None:
        self._loader = loader
        self._folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Saves if it is due. Lightning calls this after the loader's callback, as for every `Checkpoint`."""
        if self._loader.intervals.is_save_due(self._loader.progress):
            trainer.save_checkpoint(self._folder / f"samples={self._loader.progress.samples}.ckpt")


def scale_loss(module: LightningModule, loss: Tensor) -> Tensor:
    """Returns the weighted loss for a batch's mean loss. Call it once in ``training_step``, and return its result.

    Preserves: WEIGHT.

    Raises: UsageError when the train loader is not a `LightningLoader`, or the loss is scaled twice.
    """
    trainer = module.trainer
    loader = trainer.train_dataloader
    if not isinstance(loader, LightningLoader):
        raise UsageError(f"scale_loss: the train loader is a {type(loader).__name__}, not a LightningLoader")
    if not trainer.training:
        raise UsageError("scale_loss can be called only in training_step")
    return loader.scale(loss)
