"""A learning rate that follows the size of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


@contextmanager
def scaled_learning_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiplies the learning rates of all parameter groups by ``factor`` within the context.

    ::

        with scaled_learning_rate(optimizer, info.update_supervised / REFERENCE_TOKENS):
            optimizer.step()

    This is linear scaling relative to the batch for which the rate was tuned: twice the tokens, twice the rate. The square
    root of the ratio is another common choice. A scheduler sees only its own rates. All ranks compute the same factor, because
    ``update_supervised`` counts the tokens of all of them.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
