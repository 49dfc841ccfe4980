"""Accelerate: what its gradient accumulation needs to be exact with an `ODBDataLoader`.

::

    loader = ODBDataLoader(dataset, token_budget=16_384, accumulation_steps=4, collate_fn=collate)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        info = pop_step_info(batch)
        with accumulate(accelerator, model, info):
            accelerator.backward(info.scale(compute_loss(model, batch)))
        if info.is_window_end:
            optimizer.step()
            optimizer.zero_grad()

`Accelerator.prepare` leaves an `ODBDataLoader` as it is. `Accelerator.accumulate` does not know where such a loader's epoch
ends, and would carry the rest of an epoch that does not fill a window into the next one; ``is_window_end`` does know.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from odb_ref.integrations.fallback import check_strategy
from odb_ref.torch import StepInfo, UsageError


def accumulate(accelerator: Accelerator, model: nn.Module, info: StepInfo) -> AbstractContextManager[None]:
    """Forward and backward of a step go in this context: gradients are averaged over ranks at the end of a window only.

    Preserves: WEIGHT.

    Warns when the model is not sharded as it was asked for: see `odb_ref.integrations.fallback`.

    Raises: UsageError when `Accelerator.backward` would divide the loss, which ``loss_scale`` has already normalised, and when
    Accelerate does not join the ranks.
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise UsageError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) divides each loss, which "
            "would be normalised twice: leave it at 1 and pass accumulation_steps to the ODBDataLoader"
        )
    if info.step == 0:
        check_strategy(accelerator)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # Its engine averages gradients, and steps, in the backward pass that is said to end a window.
        _check_engine(accelerator)
        accelerator.sync_gradients = info.is_window_end
        return nullcontext()
    if info.is_window_end:
        return nullcontext()
    context: AbstractContextManager[None] = accelerator.no_sync(model)
    return context


def _check_engine(accelerator: Accelerator) -> None:
    steps = accelerator.deepspeed_plugin.deepspeed_config.get("gradient_accumulation_steps", 1)
    if steps not in (1, "auto"):
        raise UsageError(
            f"DeepSpeed's gradient_accumulation_steps={steps} divides each loss, which would be normalised twice: leave it at "
            "1 and pass accumulation_steps to the ODBDataLoader"
        )
