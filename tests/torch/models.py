"""A small causal model, its loss, and its gradient in one process for any samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from odb_ref.torch import ODBDataLoader, StepInfo
from tests.torch.data import collate, make_sample

Update = tuple[list[int], list[float]]
"""The numbers of its samples on one rank, and the gradient."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 6), nn.Tanh(), nn.Linear(6, 32)).double()


def compute_loss(model: nn.Module, batch: dict[str, Any], reduction: str = "mean") -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction=reduction)


def get_gradient(model: nn.Module) -> list[float]:
    gradients = [parameter.grad for parameter in model.parameters()]
    whole = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    return torch.cat([gradient.flatten() for gradient in whole]).tolist()


def compute_gradient(samples: Iterable[dict[str, Any]]) -> torch.Tensor:
    """Returns the gradient of the mean over all supervised tokens of the samples, in one process."""
    model = make_model()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        batch = collate([sample])
        total = total + compute_loss(model, batch, "sum")
        count += int((batch["labels"][:, 1:] != -100).sum())
    (total / max(1, count)).backward()
    return torch.tensor(get_gradient(model), dtype=torch.float64)


def compute_union_gradient(numbers: Iterable[int]) -> torch.Tensor:
    return compute_gradient(map(make_sample, numbers))


def check_gradient(found: Sequence[float] | torch.Tensor, expected: torch.Tensor) -> None:
    """Checks that a gradient is the expected one, to 1e-9 of its norm."""
    error = torch.as_tensor(found, dtype=torch.float64) - expected
    assert torch.linalg.norm(error) <= 1e-9 * max(torch.linalg.norm(expected).item(), 1e-3)


def list_updates(
    loader: ODBDataLoader, step: Callable[[Any, StepInfo], object], get: Callable[[], list[float]]
) -> list[Update]:
    updates: list[Update] = []
    numbers: list[int] = []
    for batch, info in loader.steps():
        step(batch, info)
        numbers += [] if info.is_idle else torch.as_tensor(batch["numbers"]).tolist()
        if info.is_update_end:
            updates.append((numbers, get()))
            numbers = []
    assert not numbers
    return updates


def check_updates(
    ranks: Iterable[list[Update]], samples: int, compute: Callable[[list[int]], torch.Tensor] = compute_union_gradient
) -> None:
    """Checks an epoch of all ranks: each sample once, and in every update the gradient of its samples in one process."""
    updates = list(zip(*ranks, strict=True))
    assert sorted(number for update in updates for numbers, _ in update for number in numbers) == list(range(samples))
    for update in updates:
        expected = compute([number for numbers, _ in update for number in numbers])
        for _, gradient in update:
            check_gradient(gradient, expected)
