"""Preference pairs of known content: what a batch must hold, and a loss that detects pairs that were split."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence


def make_pair(number: int) -> dict[str, Any]:
    """Returns a pair that is a function of its number."""
    choose = random.Random(number)
    chosen, rejected = ([choose.randint(1, 31) for _ in range(choose.randint(2, 14))] for _ in range(2))
    return {"numbers": number, "chosen_ids": chosen, "rejected_ids": rejected, "margin": choose.random()}


def collate(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts all chosen texts first, then all rejected ones, with numbers and margins by pair."""
    texts = [torch.tensor(pair[name]) for name in ("chosen_ids", "rejected_ids") for pair in pairs]
    return {
        "numbers": torch.tensor([pair["numbers"] for pair in pairs]),
        "input_ids": pad_sequence(texts, batch_first=True),
        "margin": torch.tensor([pair["margin"] for pair in pairs], dtype=torch.float64),
        "names": [f"{name} {pair['numbers']}" for name in ("chosen", "rejected") for pair in pairs],
    }


def check_pairs(batch: dict[str, Any]) -> None:
    """Checks that a batch, or a half, holds whole pairs, with each row in its place."""
    numbers = batch["numbers"].tolist()
    expected = collate([make_pair(number) for number in numbers])
    assert batch["names"] == expected["names"]
    assert torch.equal(batch["margin"], expected["margin"])
    width = expected["input_ids"].shape[1]  # a half is as wide as its batch
    assert torch.equal(batch["input_ids"][:, :width], expected["input_ids"])
    assert not batch["input_ids"][:, width:].any()


class Preference(nn.Module):
    """Computes a score for each text. The loss is the mean over pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(32, 6, padding_idx=0), nn.Tanh(), nn.Linear(6, 1, bias=False)).double()

    def forward(self, input_ids: Tensor, margin: Tensor) -> dict[str, Tensor]:
        chosen, rejected = self.layers(input_ids).sum(dim=(1, 2)).chunk(2)
        return {"loss": -logsigmoid(chosen - rejected - margin).mean()}


def compute_loss(model: nn.Module, numbers: list[int]) -> Tensor:
    """Returns the loss of one batch of these pairs."""
    batch = collate([make_pair(number) for number in numbers])
    loss: Tensor = model(input_ids=batch["input_ids"], margin=batch["margin"])["loss"]
    return loss
