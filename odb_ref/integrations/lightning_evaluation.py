"""`EvaluationLoader`: an `ODBDataLoader` for Lightning's validation, tests and predictions.

::

    class Tuned(LightningModule):
        def validation_step(self, batch, batch_idx):
            info = get_step_info(self, batch_idx)
            loss = ...  # the mean over this batch's supervised tokens
            self.log("val_loss", info.scale(loss), batch_size=float(info.local_supervised), sync_dist=True)
            if not info.is_idle:
                self.accuracy.update(...)  # of torchmetrics

    trainer.fit(Tuned(), loader, EvaluationLoader(validation, token_budget=65_536, collate_fn=collate))

Lightning's mean over an epoch, weighted by ``batch_size`` and summed over the ranks, is then the mean over all supervised
tokens. An idle step adds nothing to it. The weight is a float, because Lightning rounds down a mean of integers over ranks. To
gather outputs for each sample, use `odb_ref.gather_samples`.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "lightning", extra="lightning")

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Self, Unpack

from lightning.pytorch import LightningModule
from torch.utils.data import Dataset

from odb_ref.torch import ODBDataLoader, StepInfo, UsageError
from odb_ref.torch.settings import LoaderArguments, check_spelling, spread

_KEPT: Final = 8
"""How many steps to remember; more than Lightning reads ahead."""
_UNASKED: Final = (
    "batches are evaluated, but get_step_info(self, batch_idx) is called for none of them (with several loaders, pass it "
    "dataloader_idx too). So batches that an idle rank replays count again, and means are over batches, not samples (to train, "
    "use LightningLoader)"
)


class EvaluationLoader:
    """Yields each sample once in each evaluation, in the same number of steps on every rank. ``options`` are those of
    `ODBDataLoader`.

    Raises: UsageError like `ODBDataLoader`, when an option is not free to choose, and when `get_step_info` is never called.
    """

    def __init__(self, dataset: Dataset[object], *, token_budget: int, **options: Unpack[LoaderArguments]) -> None:
        check_spelling(options)
        settings = spread(options)
        for name in ("scaling", "accumulation_steps"):
            if name in settings:
                raise UsageError(f"EvaluationLoader: {name} is only for training")
        if "on_idle" in settings:
            raise UsageError("EvaluationLoader: Lightning needs a batch in every step, so on_idle must be 'replay'")
        self.loader = ODBDataLoader(dataset, token_budget=token_budget, **options)  # type: ignore[arg-type]
        self._newest: deque[tuple[int, StepInfo]] = deque(maxlen=_KEPT)
        self._is_asked = self._is_read = False

    def __iter__(self) -> Iterator[object]:
        is_unasked = self._is_read and not self._is_asked
        self._newest.clear()
        self._is_asked = self._is_read = False
        if is_unasked:  # the previous evaluation had one step, which ran after everything had been read
            raise UsageError(_UNASKED)
        return self._read()

    def _read(self) -> Iterator[object]:
        for index, (batch, info) in enumerate(self.loader.steps()):
            # Its counts are checked as in training, but its loss is not a part of a gradient.
            self._newest.append((index, replace(info, loss_scale=float(not info.is_idle))))
            yield batch
            if index and not self._is_asked:  # Lightning reads one batch ahead, so the previous step has run
                raise UsageError(_UNASKED)
        self._is_read = True

    def get_info(self, batch_idx: int) -> StepInfo:
        """Returns the `StepInfo` of a batch that is being evaluated. Raises: UsageError when there is no such batch."""
        self._is_asked = True
        for index, info in self._newest:
            if index == batch_idx:
                return info
        raise UsageError(f"no batch {batch_idx} is being evaluated")

    def close(self) -> None:
        """Ends the loader: see `ODBDataLoader.close`."""
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def get_step_info(module: LightningModule, batch_idx: int, dataloader_idx: int = 0) -> StepInfo:
    """Returns the `StepInfo` of the batch in ``validation_step``, ``test_step`` or ``predict_step``.

    Raises: UsageError outside these methods, and when the loader is not an `EvaluationLoader`.
    """
    trainer = module.trainer
    loaders: object = None
    if trainer.validating or trainer.sanity_checking:
        loaders = trainer.val_dataloaders
    elif trainer.testing:
        loaders = trainer.test_dataloaders
    elif trainer.predicting:
        loaders = trainer.predict_dataloaders
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    loader = loaders[dataloader_idx] if isinstance(loaders, Sequence) else loaders
    if not isinstance(loader, EvaluationLoader):
        raise UsageError(
            f"get_step_info: the loader evaluated is a {type(loader).__name__}, not an EvaluationLoader (in training_step call "
            "scale_loss(self, loss))"
        )
    return loader.get_info(batch_idx)
