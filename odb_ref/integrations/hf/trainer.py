"""`ODBTrainer`: the Hugging Face Trainer on an `ODBDataLoader`, with the exact gradient of the whole update.

::

    trainer = ODBTrainer(
        model, args, train_dataset=dataset, data_collator=collator, odb=ODBOptions(token_budget=16_384)
    )
    trainer.train()

Each loss is scaled exactly once. The Trainer's own token count (``num_items_in_batch``) would include the batches that idle
ranks replay, so it is not used (`ODBTrainer.get_batch_samples`). Without it models return the mean over their batch's
supervised tokens. `StepInfo.scale` weights this mean in a training pass, and ``loss_is_scaled_for_ga`` tells the Trainer not to
divide anything. The logged loss is then also the mean over the supervised tokens of all ranks.

In the free mode, ``update_samples=None``, the number of updates in an epoch is unknown before its end. Training is bounded by
``max_steps``, by ``num_train_epochs``, which may end in the middle of an epoch, or by `ODBOptions.max_samples`.
``docs/howto/frameworks/trainer.md`` lists what else differs from a plain Trainer.

Each rank saves its position as ``odb_loader_<rank>.json`` in a checkpoint's folder. To resume with another number of ranks, all
of these files must be on every rank. `enable` turns an existing Trainer into an `ODBTrainer`. DataParallel, sequence, context
and tensor parallelism, and ``auto_find_batch_size`` are refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from pathlib import Path
from typing import Final, cast

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_ref.integrations.accelerate import check_strategy, find_prepared_order
from odb_ref.integrations.hf.callback import TrainerHooks
from odb_ref.integrations.hf.data import choose_layout, is_shuffled, take_share, tells_epoch, warn_of_shards
from odb_ref.integrations.hf.gathering import gathering
from odb_ref.integrations.hf.losses import check_pair_loss, warn_of_other_losses
from odb_ref.integrations.hf.options import STEP_INFO, ODBOptions, check_arguments, check_engine
from odb_ref.integrations.hf.saving import SavedLoader, check_updates, has_states, read_states, read_updates
from odb_ref.integrations.hf.steps import LossAndOutputs, SteppingTrainer, covering
from odb_ref.integrations.hf.updates import PLAIN, TrainerUpdates, UpdateBatch
from odb_ref.integrations.hf.versions import compute_split, counts_first_labels, get_sampling
from odb_ref.integrations.progress import Intervals, Progress
from odb_ref.torch import ODBDataLoader, UsageError
from odb_ref.torch.loop.checks import is_sharded
from odb_ref.torch.settings import arrange

_UNBOUNDED: Final = 2**40
"""More updates than any epoch has. The epoch itself determines its end."""


class ODBTrainer(SteppingTrainer):
    """A Trainer whose train loader is an `ODBDataLoader`. All arguments other than ``odb`` are the Trainer's.

    It works with multiple inheritance: ``class Mine(ODBTrainer, SomeTrainer)``. Your own ``compute_loss`` returns the mean loss
    over the batch's supervised tokens, plus whatever it adds; the sum is weighted afterwards. Alternatively, set
    ``takes_step_info = False`` in your class, take ``inputs.pop(STEP_INFO)`` and return the loss after its ``scale``. A
    ``compute_loss_func`` returns that mean too: its ``num_items_in_batch`` counts the supervised tokens of the batch alone.
    Preserves: WEIGHT.

    Raises: UsageError when a setting of the Trainer would make weights or steps wrong.
    """

    loss_is_scaled_for_ga = True
    """Tells the Trainer not to divide the result of `compute_loss` by the micro-steps of the update."""
    model_wrapped: nn.Module

    def __init__(self, *args: object, odb: ODBOptions, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.set_odb(odb)

    def set_odb(self, odb: ODBOptions) -> None:
        """Chooses how the batches of the next training are formed.

        Raises: UsageError when these are not options, or the loss of preference pairs is not a mean over them.
        """
        if not isinstance(odb, ODBOptions):
            raise UsageError(f"odb must be ODBOptions(token_budget=...), got {odb!r}")
        if "scaling" not in odb.settings:
            check_pair_loss(self.args, self.train_dataset)
        self.odb = odb
        self._info = self.progress = self._updates = self._guard = self._before = None
        self._accepted = {}
        self._saved: list[SavedLoader] = []
        self._made = self._samples_before = 0
        self.counts_first = False
        self.remove_callback(TrainerHooks)
        # Insert it before all others, because they must see the state that it corrects.
        self.callback_handler.callbacks.insert(0, TrainerHooks(self))

    # Loader and steps ------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> TrainerUpdates:
        """Returns the steps of this rank, over the data set and data collator that the Trainer has prepared for its own loader.

        Raises: UsageError, like the class.
        """
        self._check_settings()
        prepared = super().get_train_dataloader()
        self._check_prepared(prepared)
        is_iterable = isinstance(self.train_dataset, IterableDataset)
        options = self.adopt_options(prepared)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if "generator" not in self.odb.loader:
            options["seed"] = seed
        if not is_iterable and "sampler" not in self.odb.loader:
            options["shuffle"] = get_sampling(self.args) == "random"
        options |= choose_layout(self.data_collator, self.odb.loader)
        k = self.args.gradient_accumulation_steps
        update_samples, batches, carried = self.odb.update_samples, None, 0
        if update_samples == PLAIN:
            if self.accelerator.split_batches:
                raise UsageError(
                    "split_batches=True makes per_device_train_batch_size the total of all ranks, so the samples of an update "
                    "cannot be determined: set ODBOptions(update_samples=...) to a number, or to None"
                )
            batch = (prepared.batch_size or self.args.per_device_train_batch_size) * self.args.world_size
            if not is_iterable and not {"sampler", "shard"} & set(self.odb.loader):
                order = find_prepared_order(prepared, self.args.world_size, seed)
                options |= {"sampler": order, "shard": "shared", "shuffle": False}
                batch, batches = order.batch, order.batches
            update_samples = batch * k
            carried = batch * (k - 1) if is_iterable else 0
            # A plain Trainer may count first labels in its divisor too; reproduce its run.
            is_shifted = bool(options.get("causal_shift")) and "causal_shift" not in self.odb.settings
            is_padded = (options | self.odb.settings).get("layout", "padded") == "padded"
            self.counts_first = counts_first_labels(self) and is_padded and is_shifted
            if self.counts_first:
                options["causal_shift"] = False
        elif not is_iterable and not {"sampler", "shard", "shuffle"} & set(self.odb.loader):
            options["shuffle"] = is_shuffled(prepared)
        options |= self.odb.settings
        if update_samples is not None and is_iterable and isinstance(prepared, DataLoaderDispatcher):
            warn_of_shards(self.train_dataset, self.args.world_size)
        source = prepared.dataset
        if is_iterable:
            source = take_share(self.train_dataset, self.args, options.get("shard"), prepared=source)
        if update_samples is None:
            options["accumulation_steps"] = k
        loader = ODBDataLoader(
            source,
            token_budget=self.odb.token_budget,
            update_samples=update_samples,
            **arrange(options),  # type: ignore[arg-type]
        )
        if self._saved:
            loader.load_state_dict([state["loader"] for state in self._saved])
            loader.state_dict()  # raises if the state does not fit
            check_updates(self._saved[0], update_samples)
        if batches is None and loader.has_updates_per_epoch:
            batches = loader.updates_per_epoch * k
        self._updates = TrainerUpdates(
            loader,
            source,
            k,
            batches,
            carried,
            made=self._made,
            is_continued=bool(self._saved),
            tells_epoch=is_iterable or tells_epoch(prepared, self.args.world_size),
        )
        return self._updates

    def _check_settings(self) -> None:
        check_strategy(self.accelerator)
        self.check_guard()
        if not self.loss_is_scaled_for_ga or self.accelerator.gradient_accumulation_steps != 1:
            raise UsageError(
                "the loss would be normalised twice: ODBTrainer needs loss_is_scaled_for_ga = True and an Accelerator that "
                "does not divide by the steps of an update"
            )
        if compute_split(self) > 1:
            raise UsageError("ODBTrainer does not run with sequence, context or tensor parallelism")
        check_arguments(self.args, is_free=self.is_free)
        if self.odb.update_samples == PLAIN:
            warn_of_other_losses(self)
        if self.accelerator.distributed_type is DistributedType.DEEPSPEED:
            check_engine(self.accelerator.deepspeed_plugin.deepspeed_config, self.args, self.odb)

    def _check_prepared(self, prepared: object) -> None:
        if not hasattr(prepared, "dataset"):
            raise UsageError(
                f"get_train_dataloader returned {type(prepared).__name__}, but ODBTrainer forms its own batches, from the data "
                "set and settings of a DataLoader: return one, prepared by self.accelerator.prepare"
            )
        is_whole = isinstance(prepared, DataLoader) and not isinstance(prepared, DataLoaderShard | DataLoaderDispatcher)
        if is_whole and self.args.world_size > 1 and not {"sampler", "shard"} & set(self.odb.loader):
            raise UsageError(
                "get_train_dataloader returned a DataLoader that is not prepared, so a plain Trainer does not divide it among "
                "the ranks: return self.accelerator.prepare(loader). If the data set of each rank holds only its own samples, "
                "pass ODBOptions(loader={'shard': 'given'})"
            )

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[object] | TrainerUpdates, *batch: int
    ) -> tuple[int, int, int, int, float, int, int]:
        """Returns the Trainer's bounds: those of ``max_steps``, or epochs that end when the loader ends them.

        ``batch`` is the number of samples in an update, which a Trainer before 5.3 passes.

        Raises: UsageError when the updates of an epoch are neither given nor can be estimated.
        """
        values: tuple[int, int, int, int, float, int, int]
        if not isinstance(dataloader, TrainerUpdates):
            values = super().set_initial_training_values(args, dataloader, *batch)
            return values
        k = args.gradient_accumulation_steps
        updates = self.odb.updates_per_epoch if self.is_free else None
        if self.is_free and updates is None and args.max_steps <= 0:
            try:
                updates = -(-dataloader.loader.estimate_steps() // k)
            except UsageError as error:
                raise UsageError(
                    f"the number of updates in an epoch cannot be determined ({error}): set max_steps, or "
                    "ODBOptions(updates_per_epoch=...), an estimate for the learning-rate schedule and the progress bar"
                ) from error
        self.progress = Progress(updates or max(1, args.max_steps))
        if self._saved:
            self.progress.load_state_dict(self._saved[0]["progress"])
        self._samples_before = self.progress.samples
        if updates is None or args.max_steps > 0:
            values = super().set_initial_training_values(args, dataloader, *batch)
            epochs = values[0]
            if args.max_steps > 0 and self.odb.settings.get("on_bad_sample") == "quarantine":
                # Updates may be missing, each epoch makes at least one, and training ends when all are made.
                epochs = max(epochs, args.max_steps)
            return (epochs - dataloader.first_epoch, *values[1:])
        dataloader.batches = _UNBOUNDED * k if batch else None
        epochs = math.ceil(args.num_train_epochs)
        samples = updates * self.get_total_train_batch_size(args)
        return (
            epochs - dataloader.first_epoch,
            _UNBOUNDED,
            samples,
            samples * epochs,
            samples // updates,
            _UNBOUNDED * k,
            math.ceil(updates * args.num_train_epochs),
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Returns the samples in an update, or in the free mode the Trainer's number, for its banner and its estimates."""
        given = self.odb.update_samples
        number: int = given if isinstance(given, int) else super().get_total_train_batch_size(args)
        return number

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Returns the Trainer's scheduler. It follows the samples, unless ``max_steps`` or fixed updates bound training."""
        is_new = self.lr_scheduler is None
        scheduler: LRScheduler = super().create_scheduler(num_training_steps, optimizer)
        is_bounded = self.args.max_steps > 0 or not self.is_free
        if is_new and self.odb.follows_samples and not is_bounded and isinstance(scheduler, LambdaLR):
            follow = self._follow_samples
            scheduler.lr_lambdas = [follow(function, num_training_steps) for function in scheduler.lr_lambdas]
        return scheduler

    def _follow_samples(self, function: Callable[[int], float], total: int) -> Callable[[int], float]:
        # A lambda, because a scheduler's state leaves functions out but would save an object's attributes. The schedules of
        # transformers accept any number. Rounding it would make the rate jump.
        return lambda step: function(cast(int, self.compute_share() * total) if step else 0)

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Logs like the Trainer, and adds the share of the epoch trained on, and corrects the samples per second."""
        if self.progress is not None and ("loss" in logs or "train_runtime" in logs):
            if self.progress.is_exact and self.is_free:
                logs["train_coverage"] = self.progress.coverage
            if self._guard is not None:
                logs["out_of_memory"] = self._guard.all_failures
            if logs.get("train_runtime") and (self.is_free or self.odb.max_samples is not None):
                made = self.progress.samples - self._samples_before
                logs["train_samples_per_second"] = round(made / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, device: torch.device
    ) -> tuple[list[object], None]:
        """Returns the batches of an update, without a token count, because their weights are known already."""
        self.begin_update()
        if (update := next(epoch_iterator, None)) is None:
            self.note_update()
            self.control.should_epoch_stop = True  # otherwise the loop asks again, for each update an epoch might have
            return [], None
        count = num_batches if self._updates is None else self._updates.count_batches(num_batches)
        return [*[UpdateBatch()] * (count - 1), update], None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MutableMapping[str, object],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> LossAndOutputs:
        """Returns the Trainer's loss. In training it is weighted afterwards. In an evaluation with an `ODBDataLoader` it is
        that of this rank's batch.
        """
        if self.takes_step_info:
            inputs.pop(STEP_INFO, None)
        if self.evaluated is not None:
            with gathering(self.accelerator, self.evaluated):
                # The mean over this batch, whatever other ranks have.
                return self._compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=None)
        return self._compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)

    def _compute(self, model: nn.Module, inputs: MutableMapping[str, object], **kwargs: object) -> LossAndOutputs:
        result: LossAndOutputs = super().compute_loss(model, inputs, **kwargs)
        return result

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: object, *args: object, **kwargs: object) -> None:
        """Saves like the Trainer, whatever requests it, and adds the loader's position."""
        super()._save_checkpoint(model, trial, *args, **kwargs)
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self.write_loader_state(folder)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> object:
        """Trains like the Trainer. The loader's state is read from the checkpoint too.

        A plain Trainer's checkpoint can be continued if its updates are those formed here. Its samples are read again.

        Raises: UsageError when the checkpoint holds no state.
        """
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        path = Path(folder) if folder else None
        made = None if path is None else read_updates(path)
        is_plain = path is not None and made is not None and self._reads_as_plain() and not has_states(path)
        self._saved = [] if path is None or is_plain else read_states(path)
        self._made, self._is_untried = made or 0, True
        self._info = self.progress = self._guard = self._before = None
        # The lowest of all ranks' values applies, so every rank may accept it.
        accepted = [item for state in self._saved for item in state["accepted"].items()]
        self._accepted = {by: min(tokens for of, tokens in accepted if of == by) for by, _ in accepted}
        ignores = self.args.ignore_data_skip
        if is_plain:
            warnings.warn(
                f"{folder} is a plain Trainer's checkpoint: training continues after its {made} updates, and the samples of "
                "the epoch that they read are read again",
                RuntimeWarning,
                stacklevel=2,
            )
        elif folder and ignores:
            what = "ignore_data_skip=True has no effect: the loader continues where it was saved"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
        if self.args.world_size > 1 and not self.is_deepspeed_enabled:
            self._forget_evaluation()
        # The Trainer must not skip batches in addition.
        self.args.ignore_data_skip = True
        try:
            with covering(self, "training_step", partial(self._run_update, self.training_step)):
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.ignore_data_skip = ignores
            updates, self._updates = self._updates, None
            if updates is not None:
                updates.loader.close()

    def _forget_evaluation(self) -> None:
        """Makes Accelerate prepare a model that was only evaluated. Otherwise it takes it for one ready to train, without
        DDP or FSDP, and each rank trains alone.
        """
        parts = self.model_wrapped.modules()
        if not is_sharded(self.model_wrapped) and not any(isinstance(item, DistributedDataParallel) for item in parts):
            self.model_wrapped = self.model
            self.model.__dict__.pop("_is_accelerate_prepared", None)

    def _reads_as_plain(self) -> bool:
        """Returns whether the number of updates made determines a plain Trainer's position and everything that is counted."""
        if isinstance(self.train_dataset, IterableDataset) or {"sampler", "shard"} & set(self.odb.loader):
            return False
        is_counted = self.odb.max_samples is None and self.odb.intervals == Intervals()
        return self.odb.update_samples == PLAIN and is_counted


def enable(trainer: Trainer, odb: ODBOptions) -> ODBTrainer:
    """Turns an existing Trainer into an `ODBTrainer`, and returns it.

    It gets a new class that inherits from `ODBTrainer` and its own class, so that whatever its class does to a loss remains.
    """
    kind = type(trainer)
    if not issubclass(kind, ODBTrainer):
        object.__setattr__(trainer, "__class__", type(f"ODB{kind.__name__}", (ODBTrainer, kind), {}))
    trainer.set_odb(odb)
    enabled: ODBTrainer = trainer
    return enabled
