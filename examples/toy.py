"""A stand-in for the user's code in the documents' code blocks: 480 made-up texts and a small model.

from examples.toy import collate, dataset, model, optimizer
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

VOCABULARY: Final = 128

lengths = [20 + (number * 7919 % 500) ** 2 // 1_250 for number in range(480)]
"""In tokens: from 20 to 219, most of them short."""


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Texts whose tokens are all supervised."""

    def __len__(self) -> int:
        return len(lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + lengths[index]) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads the samples of a batch. Each tensor has the shape [samples, longest]."""
    return {
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


class Model(nn.Module):
    """Predicts each token from the one before, and returns its output as a causal language model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> SimpleNamespace:
        logits = self.layers(input_ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


dataset = Texts()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
