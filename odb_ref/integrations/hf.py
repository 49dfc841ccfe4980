"""`ODBTrainer`: the Hugging Face Trainer on an `ODBDataLoader`, with the exact gradient of the whole accumulation window.

::

    trainer = ODBTrainer(
        model, args, train_dataset=dataset, data_collator=collator, odb=ODBOptions(token_budget=16_384)
    )
    trainer.train()

How a loss is scaled once: the Trainer's own token count (``num_items_in_batch``) would include the batches that idle ranks
replay, so it is not taken (`ODBTrainer.get_batch_samples`); without it models return the mean over their batch's supervised
tokens; `ODBTrainer.compute_loss` weighs that (`StepInfo.scale`); and ``loss_is_scaled_for_ga`` tells the Trainer to divide
nothing. The logged loss is then the mean over the supervised tokens of all ranks, too.

What the Trainer's own loop makes different from a plain one:

- It takes no optimizer step for the rest of an epoch of unknown length that does not fill an accumulation window, and would
  carry its gradient into the next epoch. So such an epoch ends with up to ``gradient_accumulation_steps - 1`` idle replays.
- The number of updates in an epoch is not known before it ends. Training is bounded by ``max_steps``, or by
  ``num_train_epochs`` together with `ODBOptions.updates_per_epoch`, an estimate for the learning rate's schedule.
- ``per_device_train_batch_size`` and ``dataloader_drop_last`` mean nothing here: batches are formed under the token budget.
  Nor does the Trainer's ``train_samples_per_second``, which it computes from the former.
- Evaluation is the Trainer's own, on its own loader: its loss averages over batches of equal numbers of samples.

Each rank saves its place as ``odb_loader_<rank>.json`` in a checkpoint's folder; resuming with another number of ranks needs
all of these files on every rank. DataParallel, sequence, context and tensor parallelism, and ``auto_find_batch_size`` are
refused. Run and tested with DDP; FSDP and DeepSpeed take the same path through the Trainer but were not run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_ref.integrations.steps import read_windows
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError
from odb_ref.torch.from_dataloader import ADOPTED

STEP_INFO: Final = "odb_step_info"
"""The key under which a batch carries its `StepInfo` from the loader to `ODBTrainer.compute_loss`, which takes it out."""

_STATE_STEM: Final = "odb_loader_"

_UNBOUNDED: Final = 2**62
"""More updates than any epoch takes: the epoch itself says when it ends."""

_TAKEN: Final = {
    "token_budget": "it stands beside this mapping",
    "accumulation_steps": "TrainingArguments(gradient_accumulation_steps=...) says it",
    "trainer_divides_loss": "ODBTrainer tells the Trainer not to divide, and dividing again would normalise twice",
    "on_idle": "the Trainer needs a batch in every step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ODBOptions:
    """How `ODBTrainer` forms batches. Workers, seed and order of the samples come from the TrainingArguments.

    Raises: UsageError when an option is not the caller's to choose.
    """

    token_budget: int
    updates_per_epoch: int | None = None
    """About how many optimizer updates an epoch takes; needed without ``max_steps``. Shapes the learning rate's schedule and
    the progress bar, never the length of training. Rather too high: most schedules end at a rate of 0."""
    loader: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of `ODBDataLoader`, such as ``window``, or ``causal_shift=False`` for a model that does not shift its
    labels by a token (sequence to sequence, token classification)."""

    def __post_init__(self) -> None:
        for name in self.loader:
            if name in _TAKEN:
                raise UsageError(f"ODBOptions: {name} is not to be given: {_TAKEN[name]}")
        if self.updates_per_epoch is not None and self.updates_per_epoch < 1:
            raise UsageError(f"ODBOptions: updates_per_epoch must be at least 1, got {self.updates_per_epoch}")


class TrainerSteps:
    """The train loader as the Trainer iterates it: mappings that carry their `StepInfo`, in whole accumulation windows."""

    def __init__(self, loader: ODBDataLoader, accumulation_steps: int) -> None:
        self.loader = loader
        self.first_epoch = loader.epoch
        """The epoch in which training starts: not 0 when it goes on from a checkpoint."""
        self.newest: StepInfo | None = None
        """What belongs to the batch that was handed out last; the Trainer takes the batches of a window together."""
        self._accumulation_steps = accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch to read next, counted from the one in which training started."""
        self.loader.set_epoch(self.first_epoch + epoch)

    def __iter__(self) -> Iterator[MutableMapping[str, object]]:
        k = self._accumulation_steps
        is_first = True
        for batch, info in read_windows(self.loader, k):
            if not isinstance(batch, MutableMapping):
                raise UsageError(f"the Trainer needs batches that are mappings, not {type(batch).__name__}")
            if is_first and info.step % k:
                raise UsageError(
                    f"the checkpoint was saved {info.step} steps into its epoch, which is not a multiple of "
                    f"gradient_accumulation_steps={k}: resume with the number it was saved with"
                )
            is_first = False
            batch[STEP_INFO] = self.newest = info
            yield batch


class ODBTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose train loader is an `ODBDataLoader`; every other argument is the Trainer's.

    It fits into several inheritance: ``class Mine(ODBTrainer, SomeTrainer)``. A ``compute_loss`` of one's own calls this one's,
    or takes ``inputs.pop(STEP_INFO)`` and has it ``scale`` the mean loss over the batch's supervised tokens. A
    ``compute_loss_func`` is called without ``num_items_in_batch`` and returns that mean. Preserves: WEIGHT.

    Raises: UsageError when the Trainer is set to something that would make weights or steps wrong.
    """

    loss_is_scaled_for_ga = True
    """To the Trainer: do not divide what `compute_loss` returns by the micro-steps of the window."""

    def __init__(self, *args: object, odb: ODBOptions, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.odb = odb
        self.step_info: StepInfo | None = None
        """What belongs to the batch that was trained on last."""
        self._steps: TrainerSteps | None = None
        self._states: list[Mapping[str, object]] = []
        # The loader goes on where it was saved; the Trainer must not skip batches on top of that.
        self.args.ignore_data_skip = True
        self.add_callback(_LoaderCallback(self))

    # Loader and steps ------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> TrainerSteps:
        """Returns the steps of this rank, over the data set and data collator that the Trainer has prepared for its own
        loader.

        Raises: UsageError as the class does.
        """
        self._check_settings()
        prepared = super().get_train_dataloader()
        is_iterable = isinstance(self.train_dataset, IterableDataset)
        options: dict[str, object] = {name: getattr(prepared, name) for name in ADOPTED}
        options["pin_memory"] = prepared.pin_memory and self.args.device.type != "cpu"
        if "generator" not in self.odb.loader:
            options["seed"] = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if not is_iterable and "sampler" not in self.odb.loader:
            options["shuffle"] = self.args.train_sampling_strategy == "random"
        options |= self.odb.loader
        k = self.args.gradient_accumulation_steps
        loader = ODBDataLoader(
            self.train_dataset if is_iterable else prepared.dataset,
            token_budget=self.odb.token_budget,
            accumulation_steps=k,
            **options,  # type: ignore[arg-type]
        )
        if self._states:
            loader.load_state_dict(self._states)
        self._steps = TrainerSteps(loader, k)
        return self._steps

    def _check_settings(self) -> None:
        args = self.args
        if not self.loss_is_scaled_for_ga or self.accelerator.gradient_accumulation_steps != 1:
            raise UsageError(
                "the loss would be normalised twice: ODBTrainer needs loss_is_scaled_for_ga = True and an Accelerator that "
                "does not divide by the steps of an accumulation window"
            )
        if not hasattr(Trainer, "loss_is_scaled_for_ga"):
            raise UsageError(
                "this transformers always divides the loss by the micro-steps of a window, and it would be normalised twice: "
                "ODBTrainer needs a release whose Trainer has loss_is_scaled_for_ga, such as 5.23"
            )
        if args.n_gpu > 1:
            raise UsageError("ODBTrainer does not run under DataParallel: start one process for each device (torchrun)")
        if self.get_sp_size() * self.get_cp_size() * self.get_tp_size() > 1:
            raise UsageError("ODBTrainer does not run with sequence, context or tensor parallelism")
        if args.auto_find_batch_size:
            raise UsageError("auto_find_batch_size has no batch size to find: lower ODBOptions.token_budget instead")
        if args.train_sampling_strategy not in ("random", "sequential"):
            raise UsageError(
                f"train_sampling_strategy={args.train_sampling_strategy!r} orders samples for fixed batches: "
                "use 'random' or 'sequential'"
            )

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[object] | TrainerSteps
    ) -> tuple[int, int, int, int, float, int, int]:
        """Returns the Trainer's bounds: those of ``max_steps``, or epochs that end when the loader says so.

        Raises: UsageError without ``max_steps`` and `ODBOptions.updates_per_epoch`.
        """
        if args.max_steps > 0 or not isinstance(dataloader, TrainerSteps):
            values: tuple[int, int, int, int, float, int, int] = super().set_initial_training_values(args, dataloader)
            return values
        updates = self.odb.updates_per_epoch
        epochs = int(args.num_train_epochs)
        if updates is None or epochs != args.num_train_epochs or epochs < 1:
            raise UsageError(
                "how many updates an epoch takes is known when it ends: set max_steps, or a whole number of num_train_epochs "
                "and ODBOptions(updates_per_epoch=...), an estimate for the learning rate's schedule"
            )
        k = args.gradient_accumulation_steps
        samples = updates * self.get_total_train_batch_size(args)
        return (
            epochs - dataloader.first_epoch,
            _UNBOUNDED,
            samples,
            samples * epochs,
            samples // updates,
            _UNBOUNDED * k,
            updates * epochs,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, device: torch.device
    ) -> tuple[list[object], None]:
        """Returns the batches of an accumulation window, without a token count: their weights are known already."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if not batches:
            self.control.should_epoch_stop = True  # else the loop asks on, as often as an epoch might have updates
        return batches, None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MutableMapping[str, object],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, object]:
        """Returns the Trainer's loss; in training the mean over the batch's supervised tokens times its weight.

        Raises: UsageError when the Trainer has counted tokens of a training batch on its own.
        """
        info = inputs.pop(STEP_INFO, None)
        if not isinstance(info, StepInfo):
            other: Tensor | tuple[Tensor, object] = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
            return other
        if num_items_in_batch is not None:
            raise UsageError(
                "num_items_in_batch is set for a training batch, so the loss would be normalised twice: "
                "get_batch_samples must be ODBTrainer's"
            )
        self.step_info = info
        result = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=None)
        loss = info.scale(result[0])
        return (loss, result[1]) if return_outputs else loss

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> object:
        """As the Trainer's; a checkpoint's loader state is read with it.

        Raises: UsageError when the checkpoint holds none.
        """
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        self._states = _read_states(Path(folder)) if folder else []
        self.step_info = None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            steps, self._steps = self._steps, None
            if steps is not None:
                steps.loader.close()

    @property
    def is_ending(self) -> bool:
        """True when the Trainer holds the last batches of ``num_train_epochs``."""
        newest = None if self._steps is None else self._steps.newest
        return newest is not None and newest.is_last and newest.epoch + 1 >= self.args.num_train_epochs

    def write_loader_state(self, folder: Path) -> None:
        """Saves this rank's place, after the last optimizer step, in a checkpoint's folder."""
        if self._steps is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{_STATE_STEM}{self.args.process_index}.json"
            path.write_text(json.dumps(self._steps.loader.state_dict()))


class _LoaderCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the Trainer's loop where the loader stands, and saves it."""

    def __init__(self, trainer: ODBTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if args.max_steps <= 0:
            # An estimate until the last update of the last epoch is about to be made.
            at_least = state.global_step + 2
            state.max_steps = at_least - 1 if self._trainer.is_ending else max(state.max_steps, at_least)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        info = self._trainer.step_info
        if info is not None:
            state.epoch = info.epoch + (float(info.is_last) if info.progress is None else info.progress)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._trainer.write_loader_state(folder)


def _read_states(folder: Path) -> list[Mapping[str, object]]:
    paths = sorted(folder.glob(f"{_STATE_STEM}*.json"), key=lambda path: int(path.stem.removeprefix(_STATE_STEM)))
    if not paths:
        raise UsageError(
            f"{folder} holds no state of an ODBTrainer's loader ({_STATE_STEM}0.json, one file for each rank)"
        )
    return [json.loads(path.read_text()) for path in paths]
