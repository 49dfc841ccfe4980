"""Accelerate: what its gradient accumulation needs to be exact with an `ODBDataLoader`.

::

    loader = ODBDataLoader(dataset, token_budget=16_384, loss=Loss(accumulation_steps=4), collate_fn=collate)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch, info in loader.steps():
        with accumulate(accelerator, model, info):
            accelerator.backward(info.scale(compute_loss(model, batch)))
        if info.is_update_end:
            optimizer.step()
            optimizer.zero_grad()

`Accelerator.prepare` leaves an `ODBDataLoader` as it is. `Accelerator.accumulate` does not know where such a loader's epoch
ends, and would carry the rest of an epoch that does not fill an update into the next one; ``is_update_end`` does know. A
prepared optimizer or scheduler may as well be told in every step, within the context: it steps where an update ends.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "accelerate", extra="accelerate")

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn

from odb_ref.torch import StepInfo, UsageError

_ASKED: Final = {
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
}
"""How Accelerate itself says what it was asked for, plugins included."""


def accumulate(accelerator: Accelerator, model: nn.Module, info: StepInfo) -> AbstractContextManager[None]:
    """Forward and backward of a step go in this context: gradients are averaged over ranks at the end of an update only.

    Preserves: WEIGHT.

    Warns when the model is not sharded as it was asked for (`check_strategy`), and when a schedule would run as many times too
    fast as there are ranks.

    Raises: UsageError when `Accelerator.backward` would divide the loss, which ``loss_scale`` has already normalised, or when
    the loader expects that it does; and when Accelerate does not join the ranks.
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise UsageError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) divides each loss, which "
            "would be normalised twice: leave it at 1 and pass accumulation_steps to the ODBDataLoader"
        )
    if info.weighting.is_divided_by_steps:
        raise UsageError(
            "Loss(is_divided_by_trainer=True) is not for Accelerate, which divides nothing here: leave it out"
        )
    if info.step == 0:
        check_strategy(accelerator)
        _check_schedulers(accelerator)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        _check_engine(accelerator)
    return accumulating(accelerator, model, is_update_end=info.is_update_end)


def accumulating(accelerator: Accelerator, model: nn.Module, *, is_update_end: bool) -> AbstractContextManager[None]:
    """Returns the context of a backward pass that ends an update, or adds to its gradient."""
    accelerator.sync_gradients = is_update_end
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # Its engine averages gradients, and steps, in the backward pass that is said to end an update. Accelerate before 1.8
        # does not say it.
        accelerator.deepspeed_engine_wrapped.engine.set_gradient_accumulation_boundary(is_boundary=is_update_end)
        return nullcontext()
    if is_update_end:
        return nullcontext()
    context: AbstractContextManager[None] = accelerator.no_sync(model)
    return context


def check_strategy(accelerator: Accelerator) -> None:
    """Warns when the model is replicated though it was to be sharded: Accelerate shards on accelerators only.

    Raises: UsageError when the ranks are not joined at all, so that each would train a model of its own.
    """
    found = accelerator.distributed_type
    asked = [wanted for name, wanted in _ASKED.items() if os.environ.get(name, "false").lower() == "true"]
    if found is DistributedType.NO and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f"{dist.get_world_size()} ranks are started, and Accelerate joins none of them: each would train a model of its "
            "own. Without an accelerator say Accelerator(cpu=True), or use_cpu=True"
        )
    for wanted in asked:
        if found is not wanted:
            warnings.warn(
                f"{wanted.value} was asked for, and Accelerate runs {found.value} without a word: every rank holds the whole "
                "model. Weights are the same, memory is not",
                RuntimeWarning,
                stacklevel=3,
            )


def _check_schedulers(accelerator: Accelerator) -> None:
    ranks = accelerator.num_processes
    prepared = [item for item in accelerator._schedulers if isinstance(item, AcceleratedScheduler)]
    if ranks > 1 and not accelerator.split_batches and any(item.step_with_optimizer for item in prepared):
        warnings.warn(
            f"Accelerate has a prepared schedule go {ranks} times as fast as updates are made, once for each process, as for "
            "batches that it shares out; the steps of an ODBDataLoader are those of all processes: say "
            "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_engine(accelerator: Accelerator) -> None:
    steps = accelerator.deepspeed_plugin.deepspeed_config.get("gradient_accumulation_steps", 1)
    if steps not in (1, "auto"):
        raise UsageError(
            f"DeepSpeed's gradient_accumulation_steps={steps} divides each loss, which would be normalised twice: leave it at "
            "1 and pass accumulation_steps to the ODBDataLoader"
        )
