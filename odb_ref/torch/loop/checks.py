"""Refuses models and losses that a guard cannot handle, before the guard is needed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from odb_ref.core.errors import UsageError
from odb_ref.torch.loss_check import find_parameters


def check_model(model: nn.Module) -> None:
    """Raises: UsageError when a guard could not help a rank that runs out of memory with this model."""
    if type(model).__module__.startswith("deepspeed."):
        raise UsageError(
            "DeepSpeed's engine has collectives of its own in the backward pass and in the step, and nobody can help a "
            "rank that fails between two of them"
        )
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if any(isinstance(item, DistributedDataParallel) for item in inner.modules()):
        raise UsageError(
            f"DistributedDataParallel stands inside a {type(inner).__name__}, and would average gradients where a "
            "rank that runs out of memory cannot take part: it must be the outermost (compile the model before)"
        )
    if any(isinstance(item, nn.Embedding | nn.EmbeddingBag) and item.sparse for item in model.modules()):
        raise UsageError("an Embedding with sparse=True has gradients that cannot be averaged here: use sparse=False")
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise UsageError("the model has no parameter to train: call requires_grad_ on some before the guard is made")
    if any(_steps_in_backward(parameter) for parameter in parameters):
        raise UsageError(
            "parameters are changed in the backward pass (register_post_accumulate_grad_hook, an optimizer in backward), which "
            "cannot be repeated, and before gradients are averaged: step the optimizer after the update's end"
        )
    if not is_sharded(model) and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise UsageError(
            "the model is tensor parallel (its parameters are DTensors that FSDP does not shard), with collectives in its "
            "passes, and nobody can help a rank that fails between two of them: train it without a guard"
        )


def check_parameters(loss: torch.Tensor, known: Iterable[nn.Parameter]) -> None:
    """Raises: UsageError when a loss trains parameters that are not ``known``: their gradients would not be averaged."""
    ids = {id(parameter) for parameter in known}
    for parameter in find_parameters(loss):
        if id(parameter) not in ids:
            raise UsageError(
                f"the loss trains a parameter of shape {[*parameter.shape]} that is not in the guard's model, whose gradients "
                "alone are cleared and averaged: put all that is trained into one module (an nn.ModuleList) for the guard"
            )


def is_sharded(model: nn.Module) -> bool:
    """Returns whether FSDP shards the model, or a part of it."""
    return any(isinstance(item, FSDPModule | FullyShardedDataParallel) for item in model.modules())


def _steps_in_backward(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None)) or hasattr(
        parameter, "_in_backward_optimizers"
    )
