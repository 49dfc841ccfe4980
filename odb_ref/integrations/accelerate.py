"""Accelerate: makes gradient accumulation exact with an `ODBDataLoader`.

::

    loader = ODBDataLoader(dataset, token_budget=16_384, loss=Loss(accumulation_steps=4), collate_fn=collate)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch, info in loader.steps():
        with accumulate(accelerator, model, info):
            accelerator.backward(info.scale(compute_loss(model, batch)))
        if info.is_update_end:
            optimizer.step()
            optimizer.zero_grad()

`Accelerator.prepare` leaves an `ODBDataLoader` unchanged. `Accelerator.accumulate` does not know where such a loader's epoch
ends. If the end does not fill an update, it would carry the rest into the next epoch; ``is_update_end`` prevents this. You may
also call a prepared optimizer or scheduler in every step, within the context: it steps only where an update ends.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "accelerate", extra="accelerate")

import os
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice
from typing import Final
from weakref import WeakSet

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler, prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from odb_ref.torch import StepInfo, UsageError
from odb_ref.torch.from_dataloader import find_batch_sampler
from odb_ref.torch.reading.seeding import DrawDetector, Use, compute_seed, isolate

_ASKED: Final = {"ACCELERATE_USE_FSDP": DistributedType.FSDP, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}
"""The environment variables from which Accelerate itself learns what was requested, including plugins."""


_checked: Final[WeakSet[Accelerator]] = WeakSet()


def accumulate(accelerator: Accelerator, model: nn.Module, info: StepInfo) -> AbstractContextManager[None]:
    """Returns the context for forward and backward of a step. Gradients are averaged over ranks only at the end of an update.

    Preserves: WEIGHT.

    Warns if the model is not sharded as requested (`check_strategy`), and if a prepared scheduler steps several times per
    update, once for each rank.

    Raises: UsageError when `Accelerator.backward` would divide the loss, which ``loss_scale`` has already normalised, or the
    loader expects that it does; and when Accelerate does not connect the ranks.
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise UsageError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) divides each loss, so the "
            "loss would be normalised twice: leave it at 1 and pass update_samples to the ODBDataLoader, or without it "
            "Loss(accumulation_steps=)"
        )
    if info.weighting.is_divided_by_steps:
        raise UsageError(
            "Loss(is_divided_by_trainer=True) is wrong with Accelerate, which does not divide the loss: leave it out"
        )
    if info.step == 0 or accelerator not in _checked:  # a run may resume inside an epoch
        _checked.add(accelerator)
        check_strategy(accelerator)
        _check_schedulers(accelerator)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        _check_engine(accelerator)
    return accumulating(accelerator, model, is_update_end=info.is_update_end)


def accumulating(accelerator: Accelerator, model: nn.Module, *, is_update_end: bool) -> AbstractContextManager[None]:
    """Returns the context of a backward pass, which either ends an update or adds to its gradient."""
    accelerator.sync_gradients = is_update_end
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # The engine averages gradients, and steps, in the backward pass that is declared to end an update. Accelerate before
        # 1.8 does not declare it.
        accelerator.deepspeed_engine_wrapped.engine.set_gradient_accumulation_boundary(is_boundary=is_update_end)
        return nullcontext()
    if is_update_end:
        return nullcontext()
    context: AbstractContextManager[None] = accelerator.no_sync(model)
    return context


class PlainOrder(Sampler[object]):
    """The order in which a prepared loader's ranks together would have read the data set: the same on every rank.

    The order is extended from its beginning to a multiple of ``whole`` samples, as by that loader to give ranks equally much.
    If the sampler draws from the process's generators, these are seeded from seed and epoch, so that a run can resume inside an
    epoch. The order then differs from the prepared loader's, with a warning.
    """

    def __init__(self, sampler: Iterable[object], batch: int, *, whole: int, drops_last: bool, seed: int = 0) -> None:
        if not isinstance(sampler, Sized):
            name = type(sampler).__name__
            raise UsageError(f"{name} has no length, so the samples of an update cannot be determined")
        self._sampler = sampler
        self._seed, self._epoch = seed, 0
        self.batch = batch
        """The samples in one batch of each rank, all together."""
        # With these names `load_state_dict` can extend the order as the saved job did, with other ranks or batch sizes.
        least = len(sampler) // batch * batch if drops_last else len(sampler)
        self.samples = self.own_samples = -(-least // whole) * whole
        self.batches = -(-self.samples // batch)
        """The number of batches of each rank in an epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch to list next."""
        self._epoch = epoch
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[object]:
        with isolate():
            detector = DrawDetector(compute_seed(Use.PERMUTATION, self._seed, self._epoch))
            detector.arm()
            keys = list(self._sampler)
            if detector.has_drawn():
                warnings.warn(
                    f"{type(self._sampler).__name__} draws from the process's random generators, so the updates of a plain run "
                    "cannot be reproduced: the order follows from seed and epoch instead",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if len(keys) != len(self._sampler):
            raise UsageError(
                f"{type(self._sampler).__name__} lists {len(keys)} samples, but its length is {len(self._sampler)}, from which "
                "the updates of an epoch are counted: return the number listed from its __len__"
            )
        return islice(cycle(keys), self.samples)

    def __len__(self) -> int:
        return self.samples


def find_order(accelerator: Accelerator, dataloader: DataLoader[object]) -> PlainOrder:
    """Returns the order in which all ranks together would read ``dataloader`` if it were prepared. Pass it as ``sampler=`` of
    an `ODBDataLoader` with ``shard="shared"``, and its updates are those of plain Accelerate, in each epoch.

    Raises: UsageError when that order cannot be determined beforehand.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        raise UsageError(
            "find_order: a stream has no order to take. Leave out sampler= and shard=, and let the stream yield on each rank "
            "only that rank's samples, because the ODBDataLoader does not divide it as a prepared loader does"
        )
    prepared = prepare_data_loader(
        dataloader,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        split_batches=accelerator.split_batches,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        dispatch_batches=bool(accelerator.dispatch_batches),
        put_on_device=True,  # required for it
    )
    return find_prepared_order(prepared, accelerator.num_processes, accelerator.dataloader_config.data_seed or 0)


def find_prepared_order(prepared: object, world_size: int, seed: int = 0) -> PlainOrder:
    """Returns the order of a loader that is already prepared, like `find_order`."""
    outer, inner = getattr(prepared, "batch_sampler", None), find_batch_sampler(prepared)
    sampler, batch = getattr(inner, "sampler", None), getattr(inner, "batch_size", None)
    is_plain = isinstance(inner, BatchSampler) and type(inner).__iter__ is BatchSampler.__iter__
    if not is_plain or not isinstance(sampler, Iterable) or not isinstance(batch, int):
        raise UsageError(
            f"this loader forms batches with {type(inner).__name__}, so the samples of an update cannot be determined: pass "
            "sampler or shard, or leave update_samples at None"
        )
    if isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
        raise UsageError(
            "use_seedable_sampler=False draws an epoch's order from the present state of torch's generator, so the samples of "
            "an update cannot be determined: pass DataLoaderConfiguration(use_seedable_sampler=True) (to a Trainer, as "
            "accelerator_config), or leave update_samples at None"
        )
    is_dealt = isinstance(prepared, DataLoaderDispatcher)
    batch *= 1 if getattr(prepared if is_dealt else outer, "split_batches", False) else world_size
    # A loader that deals out the batches of rank 0 extends the last one only until it can be divided.
    whole = world_size if is_dealt else batch if world_size > 1 and getattr(outer, "even_batches", True) else 1
    return PlainOrder(sampler, batch, whole=whole, drops_last=bool(getattr(inner, "drop_last", False)), seed=seed)


def check_strategy(accelerator: Accelerator) -> None:
    """Warns if the model is replicated although sharding was requested, because Accelerate shards on accelerators only.

    Raises: UsageError when the ranks are not connected at all, so that each would train its own model.
    """
    found = accelerator.distributed_type
    asked = [wanted for name, wanted in _ASKED.items() if os.environ.get(name, "false").lower() == "true"]
    if found is DistributedType.NO and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f"{dist.get_world_size()} ranks were started, but Accelerate does not connect them, so each would train its own "
            "model. Without an accelerator, pass Accelerator(cpu=True), or use_cpu=True to a Trainer"
        )
    for wanted in asked:
        if found is not wanted:
            warnings.warn(
                f"{wanted.value} was requested, but Accelerate silently runs {found.value}, so every rank holds the whole "
                "model. Weights are the same, memory use is not",
                RuntimeWarning,
                stacklevel=3,
            )


def _check_schedulers(accelerator: Accelerator) -> None:
    ranks = accelerator.num_processes
    prepared = [item for item in accelerator._schedulers if isinstance(item, AcceleratedScheduler)]
    if ranks > 1 and not accelerator.split_batches and any(item.step_with_optimizer for item in prepared):
        warnings.warn(
            f"Accelerate makes a prepared schedule take {ranks} steps in each update, one for each process. That is right for "
            "a schedule whose length was multiplied by accelerator.num_processes, as in the scripts of transformers. "
            "len(loader) counts updates, so multiply a length computed from it, too",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_engine(accelerator: Accelerator) -> None:
    steps = accelerator.deepspeed_plugin.deepspeed_config.get("gradient_accumulation_steps", 1)
    if steps not in (1, "auto"):
        raise UsageError(
            f"DeepSpeed's gradient_accumulation_steps={steps} divides each loss, so the loss would be normalised twice: leave "
            "it at 1 and pass update_samples to the ODBDataLoader, or without it Loss(accumulation_steps=)"
        )
