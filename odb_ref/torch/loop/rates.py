"""A learning rate that follows the size of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


@contextmanager
def scaled_learning_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiplies the learning rates of all groups by ``factor`` for as long as the context lasts.

    ::

        with scaled_learning_rate(optimizer, info.update_supervised / REFERENCE_TOKENS):
            optimizer.step()

    This is linear scaling: twice the tokens, twice the rate, in proportion to the batch that the rate was tuned for; the
    root of that quotient is another common choice. A schedule sees only its own rates. All ranks compute the same factor,
    since ``update_supervised`` counts what all of them train on.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
