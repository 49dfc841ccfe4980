"""The released peer in three cases of docs/howto/migrate.md that no benchmark covers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import require

require("accelerate")
released = pytest.importorskip("odb", reason="the peer is not installed: pip install online-dynamic-batching==0.1.2")

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import odb_ref.compat as ours
from tests.integrations.common import run_ranks
from tests.torch.data import Numbers, collate

COUNT = 24
SETTINGS: dict[str, Any] = {"batch_size": 1, "num_workers": 1, "prefetch_factor": 16}


def collate_numbers(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = collate(samples)
    return batch | {"numbers": torch.tensor(batch["numbers"])}


def read_all(rank: int, name: str) -> list[int]:
    odb: Any = {"released": released, "ours": ours}[name]
    loader = odb.ODBDataLoader(
        Numbers(0, COUNT), token_budget=200, collate_fn=collate_numbers, loss_scaling="approx", **SETTINGS
    )
    return [int(number) for batch in loader for number in batch["numbers"]]


def prepare(rank: int, name: str) -> list[int]:
    """Returns the sizes of the batches after `Accelerator.prepare`."""
    odb: Any = {"released": released, "ours": ours}[name]
    dataloader = DataLoader(Numbers(0, COUNT), collate_fn=collate_numbers, **SETTINGS)
    odb.apply(dataloader, token_budget=200, loss_scaling="approx")
    return [len(batch["numbers"]) for batch in Accelerator(cpu=True).prepare(dataloader)]


def run(function: Any, name: str) -> list[Any]:
    results = run_ranks(2, function, name)
    if name == "released" and any(result.error or result.is_gone for result in results):
        pytest.skip(f"the release failed: {results}")
    assert not any(result.error for result in results), results
    return [result.value for result in results]


def test_without_a_sampler_every_rank_of_the_release_reads_every_sample() -> None:
    assert sorted(number for numbers in run(read_all, "ours") for number in numbers) == list(range(COUNT))
    for numbers in run(read_all, "released"):
        assert sorted(numbers) == list(range(COUNT))


def test_prepared_batches_of_the_release_are_of_one_sample() -> None:
    assert max(size for sizes in run(prepare, "ours") for size in sizes) > 1
    assert {size for sizes in run(prepare, "released") for size in sizes} == {1}


def test_a_batch_without_a_step_counts_as_one_of_this_rank_alone_in_the_release() -> None:
    found = released.pop_step_info({"input_ids": torch.ones(2, 3)})
    assert (found.all_samples_this_step, found.loss_scale) == (2, 1.0)
    with pytest.warns(UserWarning, match="its loss is not weighed"):
        own = ours.pop_step_info({"input_ids": torch.ones(2, 3)})
    assert (own.all_samples_this_step, own.loss_scale) == (2, 1.0)
