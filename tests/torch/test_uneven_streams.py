"""Iterable data sets that are filtered as they are read: nobody knows how many samples a rank will have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info

from odb_ref.torch import ODBDataLoader
from tests.helpers.options import nested
from tests.torch.data import collate, make_sample
from tests.torch.ranks import get_values, run_ranks

COUNT, RANKS = 60, 3
KEPT = {0: 1, 1: 4, 2: 100}
"""A rank keeps of its share every so many samples; the last keeps one."""


class Filtered(IterableDataset[Any]):
    """Every third sample of a stream, of which some are kept."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in list_kept(self.rank)[first::step]:
            yield make_sample(number)


def list_kept(rank: int) -> list[int]:
    return list(range(rank, COUNT, RANKS))[:: KEPT[rank]]


def train(rank: int, num_workers: int) -> tuple[int, list[int]]:
    model = DistributedDataParallel(torch.nn.Embedding(32, 3))
    numbers: list[int] = []
    steps = 0
    options = {"token_budget": 60, "window": 8, "timeout_s": 20, "num_workers": num_workers}
    with ODBDataLoader(Filtered(rank), **nested(collate_fn=collate, **options)) as loader:  # type: ignore[arg-type]
        for batch, info in loader.steps():
            info.scale(model(batch["input_ids"]).mean()).backward()  # a collective of all ranks
            numbers += [] if info.is_idle else batch["numbers"]
            steps += 1
    return steps, numbers


@pytest.mark.parametrize("num_workers", [0, 2])
def test_filtered_streams_of_any_length_end_together(num_workers: int) -> None:
    """Checks: ALIGN, COVER. What each rank has kept, and no more, in as many steps on each."""
    # https://github.com/huggingface/datasets/issues/6594
    # https://github.com/huggingface/datasets/issues/6719
    values = get_values(run_ranks(RANKS, train, num_workers, timeout_s=60))
    assert len({steps for steps, _ in values}) == 1
    for rank, (_, numbers) in enumerate(values):
        assert sorted(numbers) == list_kept(rank)
