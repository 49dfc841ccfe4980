"""The train loader in the form in which the Trainer iterates over it: whole updates, in micro-batches formed by length.

The Trainer counts the batches it reads, per epoch and per update. `TrainerUpdates` makes it count those of a plain run, or in
the free mode ``gradient_accumulation_steps`` for each update. All batches of an update but the last are empty (`UpdateBatch`),
and the last holds the whole update. So the end of an epoch needs not fill an update, and if updates hold the samples of a plain
Trainer's, then steps, epochs, schedules, logs and checkpoints are those of the plain Trainer, whatever number of micro-batches
an update takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, MutableMapping
from typing import Final

from torch import Tensor

from odb_ref.integrations.hf.options import STEP_INFO, Inputs
from odb_ref.integrations.steps import read_updates
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError

PLAIN: Final = "plain"
"""The value of `ODBOptions.update_samples` for the number that follows from the ``TrainingArguments``."""


class UpdateBatch(dict[str, object]):
    """The micro-batches of an update. Empty for the batches that only count."""

    def __init__(self, parts: tuple[Inputs, ...] = ()) -> None:
        super().__init__()
        self.parts = parts

    def __missing__(self, name: str) -> object:
        raise KeyError(f"{name}: the train loader of an ODBTrainer yields one update at a time; its batches are .parts")


def is_idle(part: Inputs) -> bool:
    """Returns whether a micro-batch is a replay, which does not count."""
    info = part.get(STEP_INFO)
    return isinstance(info, StepInfo) and info.is_idle


def cut_rows(part: Inputs) -> Inputs:
    """Returns a micro-batch without rows."""
    return {name: value[:0] if isinstance(value, Tensor) else value for name, value in part.items()}


class TrainerUpdates:
    """The train loader in the form in which the Trainer iterates over it: one item per update."""

    def __init__(
        self,
        loader: ODBDataLoader,
        dataset: object,
        accumulation_steps: int,
        batches: int | None = None,
        carried: int = 0,
        *,
        made: int = 0,
        is_continued: bool = False,
        tells_epoch: bool = True,
    ) -> None:
        """``made`` is the number of updates in the checkpoint. If it ``is_continued``, the loader has a state of its own."""
        self.loader = loader
        self._tells_epoch = tells_epoch
        self.dataset = dataset
        """The Trainer counts it for its banner."""
        self.newest: StepInfo | None = None
        """The `StepInfo` of the last micro-batch in the last update handed out."""
        self.is_resumed = False
        """True in an epoch that resumes where it was saved."""
        self.batches = batches
        """The number of batches that a rank of a plain Trainer reads in an epoch, or None if it is unknown."""
        self._accumulation_steps = accumulation_steps
        self._carried = carried
        """A plain Trainer makes no update of up to this many samples at the end of an epoch."""
        # The Trainer counts epochs in updates.
        counted = divmod(made, -(-batches // accumulation_steps)) if batches else (0, 0)
        self._first = (0, 0) if is_continued else counted
        """The epoch, and the update in it, to begin with. Earlier updates, made by a plain Trainer, are read and skipped."""
        self.first_epoch = loader.epoch - counted[0] if is_continued or not batches else 0
        """The epoch that the Trainer counts as 0. Above 0 if it does not know how many updates an epoch has, or if earlier ones
        had fewer: because all samples of an update were set aside, or a callback ended them.
        """

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("the number of batches in an epoch is not known before it ends")
        return self.batches

    def set_epoch(self, epoch: int) -> None:
        """Chooses the next epoch, counted from `first_epoch`. Also tells the data set, if a Trainer's own loader does."""
        epoch += self.first_epoch
        self.loader.set_epoch(epoch)
        own = getattr(self.loader.dataset, "set_epoch", None)
        if self._tells_epoch and callable(own):
            own(epoch)

    def __iter__(self) -> Iterator[UpdateBatch]:
        parts: list[Inputs] = []
        samples = 0
        self.newest = None
        for batch, info in read_updates(self.loader, 1):
            if (info.epoch, info.update) < self._first:
                continue
            if not isinstance(batch, MutableMapping):
                raise UsageError(f"the Trainer needs batches that are mappings, not {type(batch).__name__}")
            if self.newest is None and not parts:
                self.is_resumed = info.update > 0
                self._check_begin(info)
            batch[STEP_INFO] = info
            parts.append(batch)
            samples += info.global_samples
            if info.is_update_end:
                self.newest = info
                if info.is_last and samples <= self._carried:
                    warnings.warn(
                        f"samples at the end of the stream: {samples}. ODBTrainer makes an update of them; a plain Trainer "
                        "reads them in fewer batches than gradient_accumulation_steps, and adds their gradient to the next "
                        "epoch's",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                yield UpdateBatch(tuple(parts))
                parts.clear()
                samples = 0

    def _check_begin(self, info: StepInfo) -> None:
        """Checks that the first step read begins an update. With fixed updates the loader itself does."""
        if self.loader.update_samples is None and info.step % self._accumulation_steps:
            raise UsageError(
                f"the checkpoint was saved {info.step} steps into its epoch, which is not a multiple of "
                f"gradient_accumulation_steps={self._accumulation_steps}: resume with the value that it was saved with"
            )

    def count_batches(self, asked: int) -> int:
        """Returns how many batches the Trainer should count for the next update, for which it asks for ``asked`` batches."""
        return self._accumulation_steps if self.is_resumed else asked

    def compute_epoch(self, max_steps: int) -> float | None:
        """Returns the Trainer's fractional epoch after the last of fixed updates handed out, or None before the first.

        For the Trainer, an epoch of a stream has all updates of the training.
        """
        if self.newest is None:
            return None
        batches = self.batches or max_steps * self._accumulation_steps
        done = min((self.newest.update + 1) * self._accumulation_steps, batches)
        return self.newest.epoch + done / batches
