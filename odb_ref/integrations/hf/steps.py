"""The steps of an `ODBTrainer`: in halves if memory runs out, and with a budget that may change during training.

With `ODBOptions.survives_out_of_memory` a pass is still the Trainer's own ``training_step``, with its precision and its
``compute_loss``. `UpdateGuard` chooses the batches for it, and averages gradients instead of DDP: see
`odb_ref.torch.loop.guard`. Metrics that ``compute_loss`` gathers are then of one rank, which may repeat a pass alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol, cast

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer

from odb_ref.integrations.accelerate import accumulating
from odb_ref.integrations.hf.data import OF_TRL
from odb_ref.integrations.hf.evaluation import EvaluatingTrainer
from odb_ref.integrations.hf.gathering import gathering
from odb_ref.integrations.hf.options import STEP_INFO, Inputs
from odb_ref.integrations.hf.saving import SavedLoader, write_state
from odb_ref.integrations.hf.updates import TrainerUpdates, UpdateBatch, cut_rows, is_idle
from odb_ref.integrations.hf.versions import compute_predicted_share
from odb_ref.integrations.progress import Progress
from odb_ref.torch import StepInfo, UsageError
from odb_ref.torch.loop.checks import is_sharded
from odb_ref.torch.loop.guard import UpdateGuard
from odb_ref.torch.loop.splitting import split_batch

LossAndOutputs = Tensor | tuple[Tensor, object]


class OwnLossFn(Protocol):
    """A Trainer's ``compute_loss_func``."""

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Returns the loss."""


def _call(function: OwnLossFn, count: int, *args: object, **kwargs: object) -> Tensor:
    # A compute_loss that calls the function itself may leave the number out, as LLaMA-Factory's does for ASFT.
    told = {"num_items_in_batch": count} if "num_items_in_batch" in kwargs else {}
    return function(*args, **kwargs | told)


class LossFn(Protocol):
    """A Trainer's ``compute_loss``."""

    def __call__(self, model: nn.Module, inputs: Inputs, *args: object, **kwargs: object) -> LossAndOutputs:
        """Returns the loss, or a tuple of the loss and the model's outputs."""


class TrainingStep(Protocol):
    """A Trainer's ``training_step``."""

    def __call__(self, model: nn.Module, inputs: Inputs, *args: object, **kwargs: object) -> Tensor:
        """Adds the gradients of a batch, and returns its loss."""


@contextmanager
def covering(trainer: Trainer, name: str, function: TrainingStep | LossFn) -> Iterator[None]:
    """Within the context, the Trainer calls this function in place of its method.

    An instance attribute covers the methods of all classes, so this includes whatever a subclass adds to the method.
    """
    own = vars(trainer).get(name)
    vars(trainer)[name] = function
    try:
        yield
    finally:
        del vars(trainer)[name]
        if own is not None:
            vars(trainer)[name] = own


_OVERRIDDEN: Final = "the loss would be normalised twice: do not override ODBTrainer's get_batch_samples"
_MEMORY: Final = "memory"
_METRICS: Final = "metrics"


class SteppingTrainer(EvaluatingTrainer):
    """The part of an `ODBTrainer` that runs steps, and sets the budget that this rank accepts."""

    _info: StepInfo | None = None
    """The `StepInfo` of the last batch trained on."""
    progress: Progress | None = None
    """The progress of training; None before it begins."""
    compute_loss_func: OwnLossFn | None
    takes_step_info = True
    """False for a Trainer that takes `STEP_INFO` out of its inputs and scales the loss itself."""
    weighed: StepInfo | None = None
    """The `StepInfo` of the pass that is running, whose loss is weighted."""
    _is_weighed = False
    """True once a loss of the present update is weighted."""
    _is_untried = True
    """True until the loss has been tried, before the first step of a training."""
    counts_first = False
    """Whether a plain Trainer's divisor also counts first labels, which have no loss."""
    _updates: TrainerUpdates | None = None
    """The train loader, while training runs."""
    _before: SavedLoader | None = None
    """The position of training before an update that was read but not yet made. None if there is no such update."""
    _guard: UpdateGuard[Inputs] | None = None
    _accepted: dict[str, int]
    """The budgets that this rank accepts, by their source. The lowest applies."""

    def training_step(self, model: nn.Module, inputs: Inputs, *args: object, **kwargs: object) -> Tensor:
        """Adds the gradients of a batch, and returns the loss, like the Trainer."""
        info = inputs.get(STEP_INFO)
        if not isinstance(info, StepInfo):
            return cast(Tensor, super().training_step(model, inputs, *args, **kwargs))
        if self._is_untried:
            self._is_untried = False
            self._try_loss(model)
        if self.odb.survives_out_of_memory and self._guard is None:
            self._guard = self._make_guard(model)
        # A guarded pass does not get the Trainer's token count, which `compute_loss` does not need.
        loss = (
            self._run_whole(info, model, inputs, *args, **kwargs)
            if self._guard is None
            else self._guard.backward(inputs, info)
        )
        self._info = info
        self._is_weighed |= info.is_idle  # a guard does not run a replay
        if self.progress is not None:
            self.progress.note_step(info)
        return loss

    def _try_loss(self, model: nn.Module) -> None:
        """Tries, before the first step, whether the loss can be weighted. All ranks try the same samples.

        Raises: UsageError when it depends on how an update is divided.
        """
        # These note metrics of each loss that they compute, and their losses are checked by name.
        is_noting = not {kind.__name__ for kind in type(self).__mro__}.isdisjoint(OF_TRL)
        is_apart = self.args.world_size > 1 and self.odb.settings.get("shard") == "given"
        is_tried = self.odb.checks_loss and self.takes_step_info and not is_noting and not is_apart
        # The engine of DeepSpeed follows the order of passes. A loss of routers depends on the batch, which is warned of.
        has_routers = getattr(getattr(self.model, "config", None), "output_router_logits", False)
        if self._updates is None or not is_tried or self.is_deepspeed_enabled or has_routers:
            return
        # Without DDP and compilation, whose preparations are those of a training pass.
        tried = model if is_sharded(model) else self.model
        modes = {part: part.training for part in tried.modules()}
        tried.eval()
        # The passes of a sharded model have collectives, and one without its backward pass would confuse it. A model that
        # recomputes activations has no room for them.
        is_light = is_sharded(model) or any(getattr(part, "gradient_checkpointing", False) for part in modes)
        try:
            with torch.no_grad() if is_light else nullcontext():
                self._updates.loader.check_loss(partial(self._compute_tried, tried))
        except UsageError as error:
            raise UsageError(f"{error}. To train nevertheless, pass ODBOptions(checks_loss=False)") from error
        finally:
            for part, mode in modes.items():
                part.training = mode

    def _compute_tried(self, model: nn.Module, batch: object) -> Tensor:
        inputs = cast(Inputs, self._prepare_inputs(batch))
        share = compute_predicted_share(inputs.get("labels")) if self.counts_first else 1.0
        with gathering(self.accelerator, None), self.compute_loss_context_manager():
            return cast(Tensor, self.compute_loss(model, inputs)) * share

    def _run_update(
        self, step: TrainingStep, model: nn.Module, update: Inputs, *args: object, **kwargs: object
    ) -> Tensor:
        """Runs the Trainer's training step for each part of an update, and returns the sum of the weighted losses. The last
        part averages the gradients over ranks.
        """
        if not isinstance(update, UpdateBatch):
            return step(model, update, *args, **kwargs)
        if self._before is None:
            raise UsageError(f"an update was read without `begin_update`, so {_OVERRIDDEN}")
        loss = torch.zeros((), device=self.args.device)
        # Without num_items_in_batch, a Trainer or a copy of its training_step divides each loss by this number.
        self.current_gradient_accumulation_steps = 1
        for part in update.parts:
            info = part[STEP_INFO]
            is_end = isinstance(info, StepInfo) and info.is_update_end
            with accumulating(self.accelerator, model, is_update_end=is_end):
                loss += step(model, part, *args, **kwargs)
        return loss

    def floating_point_ops(self, inputs: Inputs) -> int:
        """Returns the Trainer's count, summed over all parts of an update."""
        if not isinstance(inputs, UpdateBatch):
            flops: int = super().floating_point_ops(inputs)
            return flops
        return sum(self.floating_point_ops(part) for part in inputs.parts if not is_idle(part))

    def _track_num_input_tokens(self, inputs: Inputs) -> None:
        for part in inputs.parts if isinstance(inputs, UpdateBatch) else (inputs,):
            # All ranks must take part; an idle one adds nothing.
            super()._track_num_input_tokens(cut_rows(part) if is_idle(part) else part)

    def _run_whole(self, info: StepInfo, model: nn.Module, inputs: Inputs, *args: object, **kwargs: object) -> Tensor:
        self.weighed = info
        try:
            with covering(self, "compute_loss", partial(self._compute_weighed, info, self.compute_loss)):
                return cast(Tensor, super().training_step(model, inputs, *args, **kwargs))
        finally:
            self.weighed = None

    def _compute_weighed(
        self, info: StepInfo, compute_loss: LossFn, model: nn.Module, inputs: Inputs, *args: object, **kwargs: object
    ) -> LossAndOutputs:
        """Returns the result of ``compute_loss`` for a training batch, with its loss times its weight.

        Raises: UsageError when the Trainer has counted tokens itself.
        """
        if not self.takes_step_info:  # the loss is already weighted
            return compute_loss(model, inputs, *args, **kwargs)
        if kwargs.get("num_items_in_batch") is not None:
            raise UsageError(f"num_items_in_batch is set for a training batch, so {_OVERRIDDEN}")
        self._is_weighed, share = True, 1.0
        if self.counts_first:
            share = compute_predicted_share(inputs.get("labels"))
            info = replace(
                info, loss_scale=info.loss_scale * share, local_supervised=info.local_supervised if share else 0
            )
        own = self.compute_loss_func
        if own is not None:  # the function may divide by the number of units that the loss averages over
            self.compute_loss_func = partial(_call, own, max(1, round(info.local_supervised * share)))
        try:
            with gathering(self.accelerator, info) if self._guard is None else nullcontext():
                result = compute_loss(model, inputs, *args, **kwargs)
        except TypeError as error:
            if "NoneType" in str(error):
                error.add_note(
                    "num_items_in_batch is None in an ODBTrainer, which weighs a mean loss itself: return the mean over the "
                    "batch's labels then, or pass compute_loss_func, which is given the number"
                )
            raise
        finally:
            self.compute_loss_func = own
        return (info.scale(result[0]), *result[1:]) if isinstance(result, tuple) else info.scale(result)

    def _run_pass(self, model: nn.Module, inputs: Inputs, info: StepInfo) -> Tensor:
        part = copy.copy(inputs)  # compute_loss may remove items, which must be there if the pass is repeated
        part[STEP_INFO] = info
        with gathering(self.accelerator, None):
            return self._run_whole(info, model, part)

    def _make_guard(self, model: nn.Module) -> UpdateGuard[Inputs]:
        return UpdateGuard(
            model,
            self._run_pass,
            split=self.odb.split or split_batch,
            count=self.odb.count,
            memory=self.odb.memory,
            lower_budget=lambda tokens: self._accept(_MEMORY, tokens),
        )

    def check_guard(self) -> None:
        """Checks before training begins that a rank that runs out of memory can be helped, if this is requested.

        Raises: UsageError that names the obstacle.
        """
        if self.odb.survives_out_of_memory and (why := self._find_obstacle()):
            raise UsageError(f"ODBOptions(survives_out_of_memory=True): {why}")

    def _find_obstacle(self) -> str:
        strategy = self.accelerator.distributed_type
        if strategy in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            return (
                f"not with {strategy.value}: its engine has collectives of its own in the backward pass and in the step, and "
                "no other rank can help one that fails between two of them"
            )
        if self.odb.memory is None and (strategy is DistributedType.FSDP or is_sharded(self.model)):
            kind = "FSDP 2" if self.accelerator.is_fsdp2 else "FSDP"
            return (
                f"the model is sharded by {kind}, whose collectives run inside the forward pass, and no other rank can help "
                "one that fails between two of them. With ODBOptions(memory=...), a MemoryFit, batches are made to fit "
                "beforehand"
            )
        if self.odb.loader.get("layout") == "packed" and (self.odb.split is None or self.odb.count is None):
            return "a packed row (layout='packed') can be halved only with ODBOptions(split=, count=)"
        if "lomo" in str(self.args.optim):
            return f"the optimizer {self.args.optim!s} makes its update in the backward pass, which cannot be repeated"
        return ""

    @property
    def may_repeat(self) -> bool:
        """True if a pass may run again, or in parts, because memory ran out."""
        return self._guard is not None

    # How far training is ------------------------------------------------------------------------------------------------

    def compute_share(self) -> float:
        """Returns the completed share of training, from 0 to 1, as far as epochs or samples bound it."""
        if self.progress is None:
            return 0.0
        shares: list[float] = [self.progress.epochs / self.args.num_train_epochs]
        if self.odb.max_samples is not None:
            shares.append(self.progress.samples / self.odb.max_samples)
        return min(1.0, max(shares))

    @property
    def is_free(self) -> bool:
        """True in the free mode, in which updates hold different numbers of samples."""
        return self.odb.update_samples is None

    def compute_epoch(self) -> float | None:
        """Returns the Trainer's fractional epoch, or None before the first update."""
        if self.is_free or self._updates is None:
            return None if self.progress is None else self.progress.epochs
        return self._updates.compute_epoch(self.args.max_steps)

    @property
    def is_ending(self) -> bool:
        """True if the Trainer holds the last batches of ``num_train_epochs``, a whole number."""
        newest = None if self._updates is None else self._updates.newest
        return newest is not None and newest.is_last and newest.epoch + 1 >= self.args.num_train_epochs

    def begin_update(self) -> None:
        """Notes that an update is about to be read. A checkpoint saved before its optimizer step must not include it."""
        self._before, self._is_weighed = self._compute_place(), False

    def check_weighed(self) -> None:
        """Checks that losses of the update that is about to be made are weighted.

        Raises: UsageError when none is, because a subclass computes them itself.
        """
        if self.takes_step_info and not self._is_weighed:
            raise UsageError(
                f"training_step of {type(self).__name__} does not call compute_loss, so its loss has no weight: call "
                "self.compute_loss or super().training_step in it, or set takes_step_info = False in your class and pass "
                "your mean loss through inputs.pop(STEP_INFO).scale"
            )

    def note_update(self) -> None:
        """Notes that the update that was read is made, or that none was read."""
        self._before = None

    def _compute_place(self) -> SavedLoader | None:
        if self._updates is None or self.progress is None:
            return None
        place, progress = self._updates.loader.state_dict(), self.progress.state_dict()
        return {"loader": place, "progress": progress, "accepted": self._accepted}

    def write_loader_state(self, folder: Path) -> None:
        """Saves this rank's position and the progress of training, after the last optimizer step, in a checkpoint's folder."""
        place = self._before or self._compute_place()
        if place is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_state(folder, place, self.args.process_index, self.args.world_size)

    # Budget --------------------------------------------------------------------------------------------------------------

    def accept_budget(self, tokens: int) -> None:
        """Sets the token budget that this rank accepts from now on. The lowest of all ranks' applies, from the same step on.

        For your own callbacks, on any rank: see `ODBDataLoader.accept_budget`. It does not raise a budget that was lowered
        because memory ran out. Spec: R15.2.

        Raises: UsageError, like that method.
        """
        self._accept(_METRICS, tokens)

    @property
    def accepted_budget(self) -> int:
        """The last value given to `accept_budget`, initially ``ODBOptions.token_budget``."""
        return self._accepted.get(_METRICS, self.odb.token_budget)

    def note_metrics(self, metrics: dict[str, float]) -> None:
        """Asks `ODBOptions.budget_from_metrics` for the budget to accept after an evaluation."""
        if self.odb.budget_from_metrics is not None and self._updates is not None:
            tokens = self.odb.budget_from_metrics(metrics, self.accepted_budget)
            if tokens is not None:
                self.accept_budget(tokens)

    def _accept(self, by: str, tokens: int) -> None:
        accepted = self._accepted | {by: tokens}
        if self._updates is not None:
            self._updates.loader.accept_budget(min(accepted.values()))
        self._accepted = accepted
