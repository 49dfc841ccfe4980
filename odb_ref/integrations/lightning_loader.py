"""The loader on which a Lightning Trainer trains, and its position in a checkpoint: see `odb_ref.integrations.lightning`."""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "lightning", extra="lightning")

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Self, Unpack

from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import Dataset

from odb_ref.integrations.progress import Intervals, Progress
from odb_ref.integrations.steps import read_updates
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError
from odb_ref.torch.gathering import gather_objects
from odb_ref.torch.settings import LoaderArguments, Loss, check_spelling, spread

_RANKS: Final = "ranks"
_PROGRESS: Final = "progress"


class FollowedLoader:
    """A `LightningLoader` without its callback: an `ODBDataLoader` that tracks the batches that Lightning has trained on."""

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
            raise UsageError("LightningLoader: leave out is_divided_by_trainer, because Lightning always divides")
        if "on_idle" in spread(options):
            raise UsageError("LightningLoader: Lightning needs a batch in every step, so on_idle must be 'replay'")
        options["loss"] = replace(loss, is_divided_by_trainer=options.get("update_samples") is None)
        self.loader = ODBDataLoader(dataset, token_budget=token_budget, **options)  # type: ignore[arg-type]
        self.accumulation_steps = loss.accumulation_steps
        """The number by which Lightning divides the loss of a batch. With ``update_samples`` it is chosen for each batch."""
        self.intervals = Intervals() if intervals is None else intervals
        self.progress = Progress(math.inf)
        """The progress of training."""
        self._info: StepInfo | None = None
        """The `StepInfo` of the batch being trained on, or of the last one."""
        self.trainer: Trainer | None = None
        """The Trainer that is fitting with this loader."""
        self._read_ahead: deque[tuple[StepInfo, Mapping[str, object]]] = deque()
        self._place: Mapping[str, object] | None = None
        """The loader's state for a checkpoint: after the batches trained on. Initially the state at the beginning."""
        self._after: Mapping[str, object] | None = None
        """The next value of `_place`, once the present batch is trained on. None inside an update, where it does not change."""
        self._is_trained_on: Callable[[], bool] = bool
        """Whether training on that batch is done, including the optimizer's step."""
        self._is_scaled = False
        self._begun: int | None = None
        """The epoch that has begun, until one of its batches is trained on."""
        self._loaded: list[Mapping[str, object]] = []

    def __iter__(self) -> Iterator[object]:
        """Begins an epoch.

        Raises: UsageError when no Trainer with this loader's callback is training, because losses would not be weighted.
        """
        trainer = self._check_followed()
        if not trainer.training:
            raise UsageError("the train loader is read to evaluate: use EvaluationLoader for anything but training")
        if self._begun is not None and self._read_ahead:
            # Lightning has read ahead in an epoch and now begins it again.
            self.loader.set_epoch(self._begun)
            if self._loaded:
                self.loader.load_state_dict(self._loaded)
        self._begun = self.loader.epoch
        self._read_ahead.clear()
        self._info = None  # an update that was interrupted is not continued
        if self._place is None:
            self._place = self.loader.state_dict()  # before a batch is read ahead of the first step
        return self._read()

    def _check_followed(self) -> Trainer:
        """Returns the Trainer that trains with this loader's callback."""
        trainer = self.trainer
        if trainer is None or not any(getattr(item, "loader", None) is self for item in trainer.callbacks):
            raise UsageError(
                "a LightningLoader can be read only by Trainer(callbacks=[loader.callback]): use EvaluationLoader for anything "
                "but training. Tuner and LearningRateFinder remove callbacks: find the rate with a plain DataLoader that makes "
                "the same updates as update_samples="
            )
        return trainer

    def _read(self) -> Iterator[object]:
        for batch, info in read_updates(self.loader, self._counted_steps):
            self._check_followed()  # callbacks may have been removed since the epoch began
            self._read_ahead.append((info, self.loader.state_dict()))
            yield batch

    def follow(self, epoch: int) -> None:
        """Skips to Lightning's epoch if it is a later one."""
        if epoch > self.loader.epoch:
            self.loader.set_epoch(epoch)

    def begin_step(self, batch_idx: int, epoch: int, is_trained_on: Callable[[], bool]) -> None:
        """Notes that Lightning trains on the next batch. ``batch_idx`` and ``epoch`` are Lightning's own counts;
        ``is_trained_on`` returns whether training on the batch is done.

        Raises: UsageError when Lightning counts the micro-steps of an update differently from the loader.
        """
        self._settle()
        self._info, place = self._read_ahead.popleft()
        # With update_samples Lightning's count of batches does not matter, so an update can be repeated from its start.
        self._after = place if self.loader.update_samples is None or self._info.is_update_end else None
        self._is_trained_on = is_trained_on
        if self._loaded and self._info.epoch != epoch:
            warnings.warn(
                f"Lightning continues with its epoch {epoch}, but the loader with the rest of epoch {self._info.epoch}, where "
                "it was saved: Lightning counts an epoch as complete when max_steps is reached in it",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._loaded and self._info.step % self._counted_steps:
            warnings.warn(
                "the checkpoint was made inside an update, and lacks the gradient of that update's first batches: make "
                "checkpoints at the end of an update, for example with every_n_train_steps",
                RuntimeWarning,
                stacklevel=2,
            )
        self._is_scaled = False
        self._begun, self._loaded = None, []
        if (batch_idx - self._info.step) % self._counted_steps:
            raise UsageError(
                f"Lightning's batch {batch_idx} and the loader's step {self._info.step} are at different places in an update "
                f"of {self._counted_steps} batches: resume from a checkpoint made at the end of an update"
            )

    def _settle(self) -> None:
        """Updates the position once the batch is trained on. Called on demand, because other callbacks may save in any hook."""
        if self._after is not None and self._is_trained_on():
            self._place, self._after = self._after, None

    @property
    def _counted_steps(self) -> int:
        """The number of batches that make an update. It is 1 with ``update_samples``, where the loader marks the end."""
        return self.accumulation_steps if self.loader.update_samples is None else 1

    @property
    def is_inside_update(self) -> bool:
        """True if the last batch trained on has not ended its update."""
        return self._info is not None and not self._info.is_update_end

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the weighted loss of the batch being trained on. Call it once per batch.

        Raises: UsageError when there is no such batch, or its loss was already scaled.
        """
        if self._info is None or self._is_scaled:
            raise UsageError(
                "scale_loss: no batch is being trained on, or its loss was scaled before and would count twice (an optimizer "
                "that computes a loss several times in a step, such as LBFGS, is not supported)"
            )
        self._is_scaled = True
        scaled = self._info.scale(loss)
        return scaled if self.loader.update_samples is None else scaled * self.accumulation_steps

    def choose_accumulation(self, batches: int) -> int:
        """Returns the ``accumulate_grad_batches`` that makes Lightning step after this batch, number ``batches`` of the epoch
        counted from 1, only if it ends an update. Lightning steps if the value divides ``batches``, and zeroes gradients if it
        divides the number before.
        """
        if self.loader.update_samples is not None and self._info is not None:
            self.accumulation_steps = batches if self._info.is_update_end else 2 * batches
        return self.accumulation_steps

    def end_step(self) -> None:
        """Notes that Lightning has trained on the batch. Raises: UsageError when its loss was not scaled."""
        if not self._is_scaled or self._info is None:
            raise UsageError(
                "a batch was trained on without its weight: training_step must return scale_loss(self, loss)"
            )
        self.progress.note_step(self._info)

    def estimate_epoch(self) -> None:
        """Estimates the length of an epoch from some samples' lengths, if it is not known yet. A collective."""
        if self.loader.has_updates_per_epoch:
            self.progress.updates_per_epoch = self.loader.updates_per_epoch
        elif math.isinf(self.progress.updates_per_epoch):
            try:
                self.progress.updates_per_epoch = self.loader.estimate_steps() / self.accumulation_steps
            except UsageError:
                return  # for example a stream, whose length is known after the first epoch

    def count_updates(self, epochs: int) -> float:
        """Returns how many optimizer steps ``epochs`` epochs take. In the free mode this is an estimate, infinite if unknown. A
        collective.
        """
        self.estimate_epoch()
        updates = self.progress.updates_per_epoch * epochs
        return updates if math.isinf(updates) else math.ceil(updates)

    def compute_batches(self) -> int | None:
        """Returns about how many batches the present epoch has, exactly at its end. None while it is unknown."""
        info, updates = self._info, self.progress.updates_per_epoch
        if info is not None and info.is_last and info.is_update_end:
            return info.step + 1
        if self.loader.update_samples is not None or math.isinf(updates):
            return None
        batches = round(updates * self.accumulation_steps)
        return batches if info is None else max(batches, info.step + 2)

    def gather_state(self) -> dict[str, object]:
        """Returns the positions of all ranks after the batches trained on. Every rank must call it. Spec: R10."""
        self._settle()
        gathered = gather_objects(self._place or self.loader.state_dict(), None)
        # Ranks that share their batches, through a device mesh, have equal states.
        by_rank = {int(str(state["rank"])): state for state in gathered}
        return {_RANKS: [by_rank[rank] for rank in sorted(by_rank)], _PROGRESS: self.progress.state_dict()}

    def load_gathered_state(self, state: Mapping[str, object]) -> None:
        """Resumes from a saved state with the next iteration, on the present ranks.

        Raises: UsageError when it is not such a state.
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
