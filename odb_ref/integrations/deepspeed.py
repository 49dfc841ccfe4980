"""DeepSpeed's own loop: use `backward` instead of the engine's.

::

    loader = ODBDataLoader(dataset, token_budget=16_384, loss=Loss(accumulation_steps=4), collate_fn=collate)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for batch, info in loader.steps():
        backward(engine, engine(**batch).loss, info)  # the mean over this batch's supervised tokens
        engine.step()

An engine divides each loss by the ``gradient_accumulation_steps`` of its configuration, and steps each time it has counted to
that number. If the end of an epoch does not fill an update, the engine would carry it into the next epoch. `backward` tells the
engine where an update ends, and makes it divide nothing. ``train_batch_size`` and ``train_micro_batch_size_per_gpu`` have no
meaning for these batches; DeepSpeed only requires them to be consistent, and computes its own throughput from them.

This module does not import DeepSpeed. Under Accelerate use `odb_ref.integrations.accelerate.accumulate`, under the Trainer
`odb_ref.integrations.hf.ODBTrainer`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from odb_ref.torch import StepInfo, UsageError


class Engine(Protocol):
    """The parts of a ``DeepSpeedEngine`` that are used here."""

    dp_world_size: int

    def gradient_accumulation_steps(self) -> int:
        """Returns the number in the engine's configuration."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool, /) -> None:
        """Sets whether the next backward pass ends an update."""

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> Tensor | None:
        """Runs the backward pass."""


def backward(engine: Engine, loss: Tensor, info: StepInfo, logits: Tensor | None = None) -> None:
    """Runs the backward pass of a step, with the loss weighted once, even if the engine divides. Then call ``engine.step()``.

    ``logits`` are for `StepInfo.scale`. Preserves: WEIGHT.

    Raises: UsageError when the engine's updates or ranks differ from the loader's.
    """
    steps, wanted = engine.gradient_accumulation_steps(), info.weighting.accumulation_steps
    if steps not in (1, wanted):
        raise UsageError(
            f"DeepSpeed has gradient_accumulation_steps={steps}, but the loader has accumulation_steps={wanted}: set "
            "gradient_accumulation_steps to 1 in DeepSpeed's configuration. The loader decides how many batches make an "
            "update"
        )
    if engine.dp_world_size != info.world_size:
        raise UsageError(
            f"DeepSpeed averages gradients over {engine.dp_world_size} ranks, but the loader's weights are for "
            f"{info.world_size}: pass no process_group, or pass mesh= if the engine spreads a model over several processes"
        )
    divisor = wanted if info.weighting.is_divided_by_steps else 1
    engine.set_gradient_accumulation_boundary(info.is_update_end)
    engine.backward(info.scale(loss, logits) / divisor, scale_wrt_gas=False)
