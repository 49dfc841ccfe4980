"""A small causal model, its loss, and the gradient that one process has of any samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tests.torch.data import collate, make_sample


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
