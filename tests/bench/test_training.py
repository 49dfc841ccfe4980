"""The training benchmark's comparison holds for packed rows, and can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from odb_ref.torch import FlattenSamples
from tests.bench import training

SAMPLES = [[(7 * number + place) % 256 + 1 for place in range(5 + 9 * number)] for number in range(6)]
STEPS = [[SAMPLES[:2], SAMPLES[2:3]], [SAMPLES[3:5], SAMPLES[5:]]]
"""What each of two ranks has in each step."""


def train_packed(*, is_weighted: bool) -> list[list[tuple[int, list[list[int]], float]]]:
    """Returns the benchmark's record of each rank's steps. A rank's loss counts by its tokens only if ``is_weighted``."""
    model = training.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE)
    notes: list[list[tuple[int, list[list[int]], float]]] = [[], []]
    for step in STEPS:
        counts = [sum(len(ids) - 1 for ids in samples) for samples in step]
        optimizer.zero_grad()
        for rank, samples in enumerate(step):
            row: Any = FlattenSamples()(
                [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in samples]
            )
            loss = model(**row).loss * (counts[rank] / sum(counts) if is_weighted else 1 / len(step))
            loss.backward()
            assert list(training.list_samples(row)) == samples
            notes[rank].append((row["input_ids"].numel(), samples, loss.item()))
        optimizer.step()
    return notes


def test_packed_rows_have_the_losses_of_one_process_and_unweighted_ranks_have_not() -> None:
    """Checks: WEIGHT."""
    assert training.compare_losses(train_packed(is_weighted=True)) < training.TOLERANCE
    assert training.compare_losses(train_packed(is_weighted=False)) > 100 * training.TOLERANCE
